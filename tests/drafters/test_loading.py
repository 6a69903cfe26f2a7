"""Loading: every tensor counted, the target checked, all layouts read and written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm.drafters.dfly import DFly
from dllm.drafters.drafter import Context, Drafter
from dllm.drafters.export import published_tensors, save_drafter
from dllm.drafters.loading import read_tensors
from dllm.drafters.target import Target
from dllm.model.decoder import Decoder, DecoderConfig
from tests.drafters.toy import context, toy_drafter, toy_target

FAMILIES = ["dflash", "dflash_swa_scaled", "dflash2", "dfly"]


@pytest.fixture
def copy(golden, tmp_path):
    """copy(family, change_config=..., change_tensors=...) -> a changed copy of a golden draft folder."""

    def make(family, change_config=None, change_tensors=None):
        folder = tmp_path / family
        shutil.copytree(golden / family / "draft", folder)
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        if change_config:
            change_config(config)
        if change_tensors:
            change_tensors(tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def drafts(drafter, seed=0):
    """Final hidden states and greedy drafts behind fixed random taps."""
    drafter.reset(1, 64)
    drafter.feed(context(drafter, 1, 9, seed))
    anchor = torch.tensor([3])
    return drafter.block(anchor, drafter.max_drafts + 1), drafter.propose(None, anchor, drafter.max_drafts).tokens


# speculators has no place for a correction head or for scales.
@pytest.mark.parametrize(
    ("family", "layout"), [*((f, "own") for f in FAMILIES), ("dflash", "speculators"), ("dflash2", "speculators")]
)
def test_a_saved_drafter_has_the_published_names_and_drafts_the_same(golden, target, tmp_path, family, layout):
    drafter = Drafter.from_pretrained(golden / family / "draft", target)
    drafter.save_pretrained(tmp_path, None if layout == "own" else layout)
    assert (
        load_file(tmp_path / "model.safetensors").keys()
        == load_file(golden / family / "draft" / "model.safetensors").keys()
    )
    again = Drafter.from_pretrained(tmp_path, target)
    assert again.config.layout == (drafter.config.layout if layout == "own" else layout)
    for got, expected in zip(drafts(again), drafts(drafter), strict=True):
        assert torch.equal(got, expected)
    for name in ("kind", "body", "windows", "causal", "target_layer_ids", "mask_token_id", "block_length"):
        assert getattr(again.config, name) == getattr(drafter.config, name)


def test_a_saved_config_stands_where_each_engine_looks_for_it(golden, target, tmp_path):
    Drafter.from_pretrained(golden / "dflash" / "draft", target).save_pretrained(tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["num_target_layers"] == 6 and config["is_causal"] is False and "auto_map" not in config
    for place in (config, config["dflash_config"]):
        assert (place["block_size"], place["mask_token_id"], place["target_layer_ids"]) == (8, 125, [1, 3])
    assert config["dflash_config"]["causal"] is False and config["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert not any(name.startswith("model.") or "embed" in name or "lm_head" in name for name in tensors)
    assert len(tensors) == 3 + 11 * 2


def test_fusion_weights_stay_fp32_whatever_the_dtype(golden, tmp_path):
    from dllm.target import load_target

    target = load_target(golden / "dfly" / "target", dtype="bfloat16", device="cpu")
    drafter = Drafter.from_pretrained(golden / "dfly" / "draft", target)
    assert drafter.dtype == torch.bfloat16
    assert drafter.layer_fusion_weights.dtype == torch.float32
    drafter.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["layer_fusion_weights"].dtype == torch.float32


def test_a_layout_that_cannot_hold_a_drafter_is_named(golden, target, tmp_path):
    scaled = Drafter.from_pretrained(golden / "dflash_swa_scaled" / "draft", target)
    with pytest.raises(ValueError, match="input_embedding_scale"):
        scaled.save_pretrained(tmp_path, "speculators")
    with pytest.raises(ValueError, match=r"layout must be one of \['angelspec'\] for a dfly"):
        Drafter.from_pretrained(golden / "dfly" / "draft", target).save_pretrained(tmp_path, "z-lab")


def change(name: str, value):
    def apply(tensors):
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return apply


@pytest.mark.parametrize(
    ("change_tensors", "message"),
    [
        (change("layers.1.self_attn.k_norm.weight", None), r"missing \['layers.1.self_attn.k_norm.weight'\]"),
        (change("layers.0.self_attn.k_proj_target.weight", torch.zeros(2, 2)), "unknown .*k_proj_target"),
        (change("fc.weight", torch.zeros(48, 48)), r"fc.weight must have shape \(48, 96\): got \[\(48, 48\)\]"),
        (change("layers.0.self_attn.v_proj.weight", torch.zeros(16, 48)), "v_proj.weight must have shape"),
        (change("layers.0.mlp.up_proj.weight", torch.zeros(96, 8)), "up_proj.weight must have shape"),
        (change("model.norm.weight", torch.zeros(48)), "tensor norm.weight must be there once"),
        (change("embed_tokens.weight", torch.zeros(64, 48)), "embed_tokens.weight must be a copy .* shape"),
        (change("lm_head.weight", torch.zeros(128, 48)), "lm_head.weight must be a copy .* values differ"),
    ],
)
def test_missing_unknown_and_misshapen_tensors_are_named(copy, target, change_tensors, message):
    with pytest.raises(ValueError, match=message):
        Drafter.from_pretrained(copy("dflash", change_tensors=change_tensors), target)


def test_true_copies_of_the_targets_embedding_and_head_are_accepted(copy, target):
    def add(tensors):
        tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
        tensors["verifier_norm.weight"] = torch.ones(48)

    drafter = Drafter.from_pretrained(copy("dflash", change_tensors=add), target)
    assert drafter.lm_head is None


def test_training_names_of_angelspec_are_read(copy, target, golden):
    def rename(tensors: dict[str, torch.Tensor]):
        published = dict(tensors)
        tensors.clear()
        names = {
            "fc.weight": "context_proj.weight",
            "hidden_norm.weight": "context_norm.weight",
            "norm.weight": "final_norm.weight",
        }
        for name, tensor in sorted(published.items()):
            tensors["module.draft_model." + names.get(name, name)] = tensor
        tensors["module.draft_model.markov_head.w.weight"] = torch.zeros(2, 2)

    expected = drafts(Drafter.from_pretrained(golden / "dfly" / "draft", target))
    got = drafts(Drafter.from_pretrained(copy("dfly", change_tensors=rename), target))
    assert torch.equal(got[0], expected[0])


def test_a_pickled_checkpoint_is_read_without_running_code(copy, target):
    folder = copy("dfly")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert isinstance(Drafter.from_pretrained(folder, target), DFly)


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("dflash", {"num_target_layers": 7}, "num_target_layers"),
        ("dfly", {"target_num_hidden_layers": 80}, "target_num_hidden_layers"),
        ("dflash", {"vocab_size": 127}, "vocab_size"),
        ("dflash", {"hidden_size": 96}, "hidden_size"),
        ("dflash", {"target_hidden_size": 96}, "target_hidden_size"),
        (
            "dflash",
            {"num_target_layers": 9, "dflash_config": {"mask_token_id": 125, "target_layer_ids": [1, 8]}},
            "target_layer_ids",
        ),
        ("dflash", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "unknown"),
        ("dflash", {"dflash_config": {"mask_token_id": 125, "target_layer_ids": [1]}}, "fc.weight"),
    ],
)
def test_a_drafter_of_another_target_is_refused(copy, target, family, changes, key):
    with pytest.raises(ValueError, match=key):
        Drafter.from_pretrained(copy(family, lambda config: config.update(changes)), target)


def test_without_strict_what_can_run_is_a_warning(copy, target):
    folder = copy("dflash", lambda config: config.update(num_target_layers=7))
    with pytest.warns(UserWarning, match="num_target_layers must be the target's 6 layers: got 7"):
        Drafter.from_pretrained(folder, target, strict=False)


def test_a_mask_embedding_beside_the_checkpoint_is_refused(copy, target):
    folder = copy("dflash")
    torch.save(torch.zeros(48), folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
        Drafter.from_pretrained(folder, target)


@pytest.mark.parametrize(
    "change_config",
    [
        lambda c: (c["dflash_config"].update(target_layer_ids=[2, 4]), c.update(target_layer_ids=[2, 4])),
        lambda c: (c["dflash_config"].update(target_layer_ids=[0, 2]), c.update(target_layer_ids=[0, 2])),
        lambda c: (c["dflash_config"].update(target_layer_ids=[3, 1]), c.update(target_layer_ids=[3, 1])),
        lambda c: (c["dflash_config"].update(causal=True), c.update(is_causal=True)),
        lambda c: (c["dflash_config"].update(mask_token_id=3), c.update(mask_token_id=3)),
    ],
    ids=["taps one later", "taps one earlier", "taps swapped", "causal", "mask"],
)
def test_a_saved_probe_finds_settings_that_are_off_although_they_are_legal(golden, target, tmp_path, change_config):
    Drafter.from_pretrained(golden / "dflash" / "draft", target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    change_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="probe must be answered as recorded"):
        Drafter.from_pretrained(tmp_path, target)


def test_a_saved_probe_is_answered_in_bf16_too(golden, target, tmp_path):
    from dllm.target import load_target

    for family in FAMILIES:
        Drafter.from_pretrained(golden / family / "draft", target).save_pretrained(tmp_path / family)
        half = load_target(golden / family / "target", dtype="bfloat16", device="cpu")
        assert Drafter.from_pretrained(tmp_path / family, half).dtype == torch.bfloat16


def test_a_drafter_saved_for_another_target_warns(tmp_path):
    drafter = toy_drafter("dflash")
    save_drafter(drafter, tmp_path)
    other = toy_target(seed=0)
    other.embed_tokens.weight[0].add_(1.0)
    with pytest.warns(UserWarning, match="target") as record:
        Drafter.from_pretrained(tmp_path, other, strict=False)
    assert ["probe must" in str(w.message) or "target_fingerprint" in str(w.message) for w in record] == [True, True]
    with pytest.raises(ValueError, match="probe must be answered as recorded"):
        Drafter.from_pretrained(tmp_path, other)


def test_a_reduced_head_keeps_its_own_rows(tmp_path):
    target = toy_target(vocab=32)
    drafter = toy_drafter("dflash", target, draft_vocab_size=8)
    ids = torch.tensor([0, 3, 4, 9, 17, 20, 30, 31])
    drafter.d2t.copy_(ids - torch.arange(8))
    drafter.save_pretrained(tmp_path, "speculators")
    again = Drafter.from_pretrained(tmp_path, target)
    assert again.lm_head is not None and drafter.lm_head is not None
    assert torch.equal(again.lm_head.weight, drafter.lm_head.weight)
    assert again.vocab_map().tolist() == ids.tolist()
    raw = published_tensors(drafter)
    assert raw["t2d"].nonzero().squeeze(1).tolist() == ids.tolist()
    with pytest.raises(ValueError, match="d2t must map rows to distinct ids"):
        read_tensors(drafter, {**raw, "d2t": torch.full((8,), 40)})
    with pytest.raises(ValueError, match="t2d must mark exactly"):
        read_tensors(drafter, {**raw, "t2d": ~raw["t2d"]})


def test_taps_are_the_outputs_of_the_named_layers(target):
    ids = torch.randint(128, (1, 7))
    logits, features = Target.of(target).read(ids, [1, 4])
    with torch.no_grad():
        reference = target(input_ids=ids, output_hidden_states=True)
    assert torch.equal(features, torch.cat([reference.hidden_states[2], reference.hidden_states[5]], -1))
    assert torch.equal(logits, reference.logits)


def test_our_decoder_and_a_hugging_face_target_give_the_same_taps_and_the_same_drafts(golden, target):
    from dllm.families.loading import load_checkpoint

    own, *_ = load_checkpoint(golden / "dfly" / "target", dtype="float32", device="cpu")
    ids = torch.randint(128, (1, 12), generator=torch.Generator().manual_seed(0))
    texts = []
    for model in (own, target):
        drafter = Drafter.from_pretrained(golden / "dfly" / "draft", model)
        logits, features = drafter.target.read(ids, drafter.config.target_layer_ids)
        drafter.reset(1, 64)
        drafter.feed(Context(features[:, :-1], torch.ones(1, 11, dtype=torch.bool)))
        texts.append((logits, features, drafter.propose(None, ids[:, -1], 7).tokens))
    torch.testing.assert_close(texts[0][0], texts[1][0], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(texts[0][1], texts[1][1], atol=2e-4, rtol=1e-4)
    assert texts[0][2].tolist() == texts[1][2].tolist()


def test_a_layer_that_adds_its_number_shows_which_outputs_are_tapped():
    class AddsItsNumber(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x, cos, sin, mask, past=None):
            return x + self.number, None, None

    decoder = Decoder(DecoderConfig(8, 16, 24, 4, 2, 1, 8, 64)).requires_grad_(False)
    decoder.layers = torch.nn.ModuleList(AddsItsNumber(i) for i in range(4))
    decoder.embed_tokens.weight.zero_()
    _, features = Target.of(decoder).read(torch.tensor([[1, 2]]), [0, 2, 3])
    assert features[0, 0].view(3, 16)[:, 0].tolist() == [0, 3, 6]


def test_something_that_is_no_causal_language_model_is_named():
    with pytest.raises(TypeError, match="target must be a Hugging Face causal LM .* got Linear"):
        Target.of(torch.nn.Linear(2, 2))


def test_check_reports_what_was_loaded_and_measures_acceptance(golden, target):
    drafter = Drafter.from_pretrained(golden / "dflash" / "draft", target)
    # A prompt whose greedy text the drafter was fitted to; the trace of the golden file commits 40 tokens in 11 passes.
    trace = json.loads((golden / "dflash" / "traces.json").read_text())[0]
    report = drafter.check(torch.tensor([trace["prompt"]]), num_tokens=40)
    assert (report.mask_token_id, report.target_layer_ids, report.windows) == (125, (1, 3), (None, None))
    assert report.template == "unknown" and report.recorded_error is None
    assert report.accept_length == pytest.approx(39 / 11, abs=1e-6)
    assert 0 < report.slot_acceptance[0] <= 1
    assert "accept_length" in str(report)


def test_check_refuses_a_tokenizer_with_another_chat_template(target):
    class Tokenizer:
        chat_template = "{{ messages }}"

    drafter = toy_drafter("dflash", metadata={"chat_template_sha256": "0" * 16})
    with pytest.raises(ValueError, match="chat_template_sha256"):
        drafter.check(tokenizer=Tokenizer())
