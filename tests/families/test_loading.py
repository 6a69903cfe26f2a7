"""Checkpoints from folders: shards, ties, dtypes, and an error that names what is wrong."""

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm.families import Family, find_family, register_family
from dllm.families.loading import load_checkpoint as load
from dllm.families.loading import override_spec, raw_logits
from dllm.model.weights import save_safetensors
from tests.families.golden import FOLDERS, GOLDEN, NAMES, golden_lm


def load_checkpoint(*args: Any, **options: Any) -> tuple[Any, Any, dict, Any]:
    """The loader with a module of any type, so that tests may look inside it."""
    return load(*args, **options)


OWN_READER = [name for name in NAMES if name != "diffusion_gemma"]

TABLES = shutil.ignore_patterns("trace*", "unit.safetensors", "scheduler*")
"""Files of a golden folder that are no part of a checkpoint."""


@pytest.fixture
def copied(tmp_path):
    """Copy a golden folder, change its tensors and its config, and return where it is."""

    def copy(folder, tensors=None, **config):
        target = tmp_path / folder
        shutil.copytree(GOLDEN / folder, target, ignore=TABLES)
        if tensors is not None:
            state = load_file(target / "model.safetensors")
            tensors(state)
            save_file(state, target / "model.safetensors")
        if config:
            values = json.loads((target / "config.json").read_text()) | config
            (target / "config.json").write_text(json.dumps(values))
        return target

    return copy


@pytest.mark.parametrize("folder", FOLDERS)
def test_shards_give_the_same_model_as_one_file(folder, tmp_path):
    """Shards of 20 kB part q from k and experts from one another."""
    target = tmp_path / folder
    shutil.copytree(GOLDEN / folder, target, ignore=TABLES)
    state = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    assert len(save_safetensors(state, target, max_shard_bytes=20_000)) > 10
    whole, spec, _, _ = load_checkpoint(GOLDEN / folder, device="cpu")
    sharded, _, _, found = load_checkpoint(target, device="cpu")
    assert found == target
    assert whole.state_dict().keys() == sharded.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, sharded.state_dict()[name]), name
    # Buffers that no file stores are there too. Where a tensor starts in memory may change its products' last bit.
    ids = torch.arange(1, 20)[None]
    torch.testing.assert_close(raw_logits(whole, spec, ids), raw_logits(sharded, spec, ids), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_missing_tensor_is_named_as_the_checkpoint_calls_it(folder, copied):
    names = sorted(load_file(GOLDEN / folder / "model.safetensors"))
    for name in (
        names[0],
        names[len(names) // 2],
        next(n for n in names if "v_proj" in n or "qkv" in n or "query_key" in n),
    ):
        target = copied(folder, lambda state, name=name: state.pop(name))
        with pytest.raises(ValueError, match=f"missing: .*{name.replace('.', '[.]')}"):
            load_checkpoint(target, device="cpu")
        shutil.rmtree(target)


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_unknown_tensor_is_named(folder, copied):
    target = copied(folder, lambda state: state.update({"model.layers.0.surprise.weight": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"1 unknown.*model\.layers\.0\.surprise\.weight"):
        load_checkpoint(target, device="cpu")


@pytest.mark.parametrize("folder", OWN_READER)
def test_a_misshapen_tensor_is_named_with_both_shapes(folder, copied):
    name = next(n for n in sorted(load_file(GOLDEN / folder / "model.safetensors")) if "norm" in n and "weight" in n)
    target = copied(folder, lambda state: state.update({name: torch.zeros(7)}))
    with pytest.raises(ValueError, match=r"must have shape \(\d+,\): got \(7,\)"):
        load_checkpoint(target, device="cpu")


def test_a_tied_head_is_not_in_the_file_and_is_the_embedding(copied):
    target = copied("fast_dllm_v2", lambda state: state.pop("lm_head.weight"), tie_word_embeddings=True)
    module, _, _, _ = load_checkpoint(target, device="cpu")
    assert module.head_weight is module.embed_tokens.weight
    assert "lm_head.weight" not in module.state_dict()


def test_a_tied_head_that_is_in_the_file_all_the_same_is_dropped(copied):
    module, _, _, _ = load_checkpoint(copied("llada", weight_tying=True), device="cpu")
    assert module.head_weight is module.embed_tokens.weight


def test_an_untied_head_that_is_missing_is_an_error(copied):
    with pytest.raises(ValueError, match=r"missing.*lm_head\.weight"):
        load_checkpoint(copied("dream", lambda state: state.pop("lm_head.weight")), device="cpu")


def test_dtype_auto_is_the_checkpoints_own_and_a_name_or_dtype_casts(copied):
    target = copied("dream", lambda state: state.update({k: v.bfloat16() for k, v in state.items()}))
    assert load_checkpoint(target, device="cpu")[0].dtype == torch.bfloat16
    assert load_checkpoint(target, dtype="float16", device="cpu")[0].dtype == torch.float16
    assert load_checkpoint(target, dtype=torch.float32, device="cpu")[0].dtype == torch.float32
    with pytest.raises(ValueError, match="dtype must be 'auto' or one of float64"):
        load_checkpoint(target, dtype="int8", device="cpu")


def test_the_expert_bias_keeps_fp32_in_a_half_precision_model():
    lm = golden_lm("llada2_moe", dtype="bfloat16")
    moe = lm.model.layers[1].mlp
    assert (moe.expert_bias.dtype, moe.router.weight.dtype) == (torch.float32, torch.bfloat16)
    stored = load_file(GOLDEN / "llada2_moe" / "model.safetensors")["model.layers.1.mlp.gate.expert_bias"]
    assert torch.equal(moe.expert_bias, stored)


def test_stop_ids_of_the_generation_config_are_added(copied):
    target = copied("sdar")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [145, 143]}))
    assert load_checkpoint(target, device="cpu")[1].eos_token_ids == (143, 145)


def test_device_and_device_map_are_checked():
    folder = GOLDEN / "llada"
    with pytest.raises(ValueError, match="give device or device_map, not both"):
        load_checkpoint(folder, device="cpu", device_map={"": "cpu"})
    with pytest.raises(ValueError, match=r"device_map must name parts of the model.*transformer\.h"):
        load_checkpoint(folder, device_map={"": "cpu", "transformer.h.0": "cpu"})
    with pytest.raises(ValueError, match="device_map must cover every tensor"):
        load_checkpoint(folder, device_map={"layers": "cpu"})
    with pytest.raises(ValueError, match="device must be 'auto' or a torch device"):
        load_checkpoint(folder, device="gpu:0")
    module, _, _, _ = load_checkpoint(folder, device_map={"": "cpu", "layers.2": "cpu"})
    assert module.device.type == "cpu"


def test_layers_on_another_device_get_their_inputs_there_and_answer_at_home():
    from dllm.families.placement import spread

    lm, other = golden_lm("llada"), golden_lm("llada")
    # One device stands for two: the "far" layer claims the meta device, and the hooks have to ask for it.
    lm.model.layers[1].to("meta")
    spread(lm.model, {"": torch.device("cpu")})
    hooks = lm.model.layers[1]._forward_pre_hooks
    assert len(hooks) == 1
    assert not lm.model.layers[0]._forward_pre_hooks
    (moved, kwargs) = next(iter(hooks.values()))(lm.model.layers[1], (torch.zeros(2), None), {"past": (torch.ones(1),)})
    assert (moved[0].device.type, moved[1], kwargs["past"][0].device.type) == ("meta", None, "meta")
    assert not other.model.layers[1]._forward_pre_hooks


def test_a_device_without_its_index_is_the_same_device():
    from dllm.families.placement import spread

    lm = golden_lm("llada")
    # Tensors on the CPU say "cpu"; on CUDA it is the other way round, tensors say "cuda:0" where "cuda" was asked for.
    spread(lm.model, {"": torch.device("cpu", 0)})
    assert not any(layer._forward_pre_hooks for layer in lm.model.layers)


@pytest.mark.gpu
@torch.no_grad()
def test_a_decoder_spread_over_cpu_and_gpu_equals_the_whole_one():
    ids = torch.arange(1, 20)[None]
    whole, spec, _, _ = load_checkpoint(GOLDEN / "dream", device="cpu")
    parts, _, _, _ = load_checkpoint(GOLDEN / "dream", device_map={"": "cpu", "layers.1": "cuda:0"})
    assert parts.layers[1].mlp_norm.weight.is_cuda
    torch.testing.assert_close(raw_logits(parts, spec, ids), raw_logits(whole, spec, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("text", ["{not json", "[]", "\x00"])
def test_a_damaged_config_is_named(text, copied):
    target = copied("llada")
    (target / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json must"):
        load_checkpoint(target)


def test_a_missing_config_and_missing_weights_are_named(copied):
    target = copied("llada")
    (target / "model.safetensors").unlink()
    (target / "cases.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        load_checkpoint(target)
    (target / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_checkpoint(target)


def test_a_config_without_a_needed_field_is_named(copied):
    target = copied("llada")
    config = json.loads((target / "config.json").read_text())
    del config["d_model"]
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json must have 'd_model' for family 'llada'"):
        load_checkpoint(target)


@pytest.mark.parametrize(
    ("folder", "change"),
    [
        ("llada", {"block_type": "sequential"}),
        ("llada", {"alibi": True}),
        ("dream", {"use_sliding_window": True}),
        ("llada2_moe", {"score_function": "softmax"}),
        ("mdlm", {"time_conditioning": True}),
        ("fast_dllm_v2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ],
)
def test_a_config_option_that_is_not_computed_is_refused(folder, change, copied):
    with pytest.raises(ValueError, match=f"config {next(iter(change))} must"):
        load_checkpoint(copied(folder, **change))


def test_damaged_and_missing_shards_are_named(copied):
    target = copied("llada")
    (target / "model.safetensors").write_bytes(b"\x10" * 40)
    with pytest.raises(ValueError, match=r"model\.safetensors must be a whole safetensors file"):
        load_checkpoint(target)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors is missing"):
        load_checkpoint(target)


def test_several_files_without_an_index_are_refused(copied):
    target = copied("llada")
    (target / "model.safetensors").rename(target / "part-a.safetensors")
    with pytest.raises(ValueError, match="2 safetensors files and no model"):
        load_checkpoint(target)


@pytest.mark.parametrize("hub_id", ["GSAI-ML/LLaDA-8B-Base", "no-such-owner/no-such-model"])
def test_a_hub_id_offline_says_what_to_do(hub_id, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"hub id '{hub_id}' .*hf download {hub_id}"):
        load_checkpoint(hub_id)


def test_neither_folder_nor_hub_id(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_checkpoint(tmp_path / "absent")
    with pytest.raises(ValueError, match="no hub id such as"):
        load_checkpoint("./a folder/with spaces")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        load_checkpoint(tmp_path / "file")


def test_spec_overrides_replace_fields_and_an_unknown_one_lists_those_that_exist():
    _, spec, _, _ = load_checkpoint(
        GOLDEN / "fast_dllm_v2", device="cpu", spec_overrides={"mask_token_id": 165, "eos_token_ids": [145, 143]}
    )
    assert (spec.mask_token_id, spec.eos_token_ids) == (165, (145, 143))
    with pytest.raises(ValueError, match=r"fields of DecodeSpec \(mask_token_id, .*\): got \['mask_id'\]"):
        override_spec(spec, {"mask_id": 3})
    with pytest.raises(ValueError, match="mask_token_id must be in"):
        override_spec(spec, {"mask_token_id": 192})


def test_a_published_id_outside_the_vocabulary_is_no_id_rather_than_a_guess():
    _, spec, _, _ = load_checkpoint(GOLDEN / "fast_dllm_v2", device="cpu")
    assert spec.mask_token_id is None
    real = json.loads((GOLDEN / "fast_dllm_v2" / "config.json").read_text()) | {
        "vocab_size": 152064,
        "eos_token_id": 151645,
    }
    assert find_family(real).spec(real).mask_token_id == 151665


@pytest.mark.parametrize(
    ("config", "mask", "eos", "shift", "block"),
    [
        ({"model_type": "llada", "vocab_size": 126464, "eos_token_id": 126081}, 126336, (126081, 126348), 0, 32),
        ({"model_type": "Dream", "vocab_size": 152064, "eos_token_id": 151643}, 151666, (151643, 151645), 1, 32),
        ({"model_type": "sdar", "vocab_size": 151936, "eos_token_id": 151643}, 151669, (151643, 151645), 0, 4),
        ({"model_type": "Fast_dLLM_Qwen", "vocab_size": 152064, "eos_token_id": 151645}, 151665, (151645,), 1, 32),
        ({"model_type": "llada2_moe", "vocab_size": 157184, "pad_token_id": 156892}, 156895, (156892,), 0, 32),
        ({"model_type": "mdlm", "vocab_size": 50258}, 50257, (50256,), 0, 1024),
        ({"model_type": "bd3lm", "vocab_size": 50258, "block_size": 16}, 50257, (50256,), 0, 16),
    ],
)
def test_published_ids_and_conventions(config, mask, eos, shift, block):
    """Released configs, as far as the spec reads them, without the ids that some of them leave out."""
    shape = {
        "d_model": 64, "n_heads": 4, "n_layers": 1, "mlp_hidden_size": 64, "max_sequence_length": 4096,
        "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096, "model_length": 1024,
    }  # fmt: skip
    spec = find_family(config).spec(shape | config)
    assert (spec.mask_token_id, spec.eos_token_ids, spec.logits_shift, spec.block_length) == (mask, eos, shift, block)


def test_an_unknown_family_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"family must be one of \[.*'llada'.*\]: got 'lada'"):
        load_checkpoint(GOLDEN / "llada", family="lada")
    with pytest.raises(ValueError, match="no family reads model_type 'mamba'"):
        find_family({"model_type": "mamba"})


def test_a_family_from_outside_is_used_and_its_name_must_be_new(copied, monkeypatch):
    from dllm import families as room

    monkeypatch.setattr(room, "_registry", dict(room._registry))
    llada = find_family({"model_type": "llada"})
    outside = Family("outside", lambda c: c.get("model_type") == "outside", llada.build, llada.spec, llada.sources)
    register_family(outside)
    module, spec, _, _ = load_checkpoint(copied("llada", model_type="outside"), device="cpu")
    assert spec.mask_token_id == 150
    assert next(module.parameters()).device.type == "cpu"
    with pytest.raises(ValueError, match="family name must be new"):
        register_family(outside)
    monkeypatch.setattr(room, "_registry", {})
    with pytest.raises(ValueError, match="'llada' is registered"):
        register_family(replace(outside, name="llada"))


def test_loading_leaves_no_gradients_and_eval_mode():
    module, _, _, _ = load_checkpoint(GOLDEN / "bd3lm", device="cpu")
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
