"""The DFly plugin without vLLM: its arithmetic is our drafter's, it is declared and registered, and the model class holds
together when the proposer drives it (on stand-ins for the few vLLM classes that it builds on).
"""

import json
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import dllm.bridge
from dllm.bridge.engines import export_for_engine
from dllm.bridge.vllm_plugin import ARCHITECTURES, MODEL_CLASS, DFlyExtras, register
from dllm.drafters.drafter import Context, Drafter, context_keys
from tests.speculative import hf_target, random_drafter

DRAFTS = 5


@pytest.fixture
def exported(tmp_path):
    """(drafter, config of its folder as attributes, tensors of its folder)."""
    drafter = random_drafter("dfly", hf_target())
    export_for_engine(drafter, tmp_path / "draft", "vllm", target="t", dtype=torch.float32)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    return drafter, SimpleNamespace(**config), load_file(tmp_path / "draft" / "model.safetensors")


@pytest.fixture
def extras(exported):
    """The plugin's own part, with the exported weights."""
    _, config, tensors = exported
    module = DFlyExtras.of_config(config)
    assert set(tensors) - {name for name, _ in module.take_weights(tensors.items())} == set(module.state_dict())
    return module


def test_a_dfly_is_exported_for_vllm_with_its_taps_where_the_first_runner_looks(tmp_path):
    target = hf_target()
    drafter = random_drafter("dfly", target)
    start = export_for_engine(drafter, tmp_path, "vllm", target="t", num_drafts=3)
    assert json.loads(start.command[-1]) == {"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": 3}
    assert any("dllm-toolkit must be installed beside vllm" in note for note in start.notes)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DFlyModel"]
    for name, value in config["dflash_config"].items():
        assert config["is_causal" if name == "causal" else name] == value
    assert {"target_layer_ids", "mask_token_id"} <= set(config["dflash_config"])
    again = Drafter.from_pretrained(tmp_path, target)
    assert again.config.kind == "dfly" and again.config.target_layer_ids == drafter.config.target_layer_ids


def test_contexts_are_those_that_the_drafter_fuses(exported, extras):
    drafter = exported[0]
    features = torch.randn(6, drafter.config.feature_width)
    ours = drafter.fuse(features[None])
    theirs = extras.contexts(features, drafter.fc(features))
    for layer, fused in enumerate(ours):
        torch.testing.assert_close(drafter.hidden_norm(theirs[:, layer]), fused[0])
    assert not torch.equal(ours[0], ours[1])


def test_the_walk_of_several_requests_drafts_what_each_drafts_alone(exported, extras):
    drafter = exported[0]
    drafter.head_candidates = None
    hidden, anchors = torch.randn(3, DRAFTS, 16), torch.tensor([4, 9, 30])
    rows = extras.walk(hidden.flatten(0, 1), anchors, drafter.target.embed, drafter.logits)
    assert rows.shape == (3 * DRAFTS, 40)
    tokens = rows.argmax(-1).view(3, DRAFTS)
    for b in range(3):
        assert torch.equal(tokens[b], drafter.choose(hidden[b : b + 1], anchors[b : b + 1], 0.0, None).tokens[0])
    # The correction decides something here.
    assert not torch.equal(tokens, drafter.logits(hidden).argmax(-1))


def test_a_walk_without_a_correction_is_one_product(exported):
    config = SimpleNamespace(**{**vars(exported[1]), "enable_hidden_correction": False})
    plain = DFlyExtras.of_config(config)
    hidden = torch.randn(4, 16)
    assert torch.equal(plain.walk(hidden, torch.tensor([1, 2]), F.relu, torch.tanh), torch.tanh(hidden))


def test_slots_that_do_not_divide_among_requests_missing_taps_and_wrong_weights_are_named(exported):
    _, config, tensors = exported
    module = DFlyExtras.of_config(config)
    with pytest.raises(ValueError, match="hidden must hold as many slots for each of 3 anchors: got 10"):
        module.walk(torch.randn(10, 16), torch.tensor([1, 2, 3]), F.relu, F.relu)
    with pytest.raises(ValueError, match="dflash_config.target_layer_ids must name the tapped layers: got none"):
        DFlyExtras.of_config(SimpleNamespace(**{**vars(config), "dflash_config": None}))
    short = {name: value for name, value in tensors.items() if name != "hidden_correction.up_proj.weight"}
    with pytest.raises(ValueError, match=r"must hold \['hidden_correction.up_proj.weight'\]: they are missing"):
        list(module.take_weights(short.items()))
    with pytest.raises(ValueError, match=r"layer_fusion_weights must be \(2, 2\) as config.json says: got \(1, 2\)"):
        list(module.take_weights({"layer_fusion_weights": torch.zeros(1, 2)}.items()))
    with pytest.raises(ValueError, match="hidden_correction.bias must be no such tensor"):
        list(module.take_weights({"hidden_correction.bias": torch.zeros(1)}.items()))


def test_the_plugin_is_declared_and_registers_both_names_once(monkeypatch):
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert declared["project"]["entry-points"]["vllm.general_plugins"] == {"dllm": "dllm.bridge.vllm_plugin:register"}
    known: dict[str, str] = {}
    registry = SimpleNamespace(get_supported_archs=lambda: list(known), register_model=known.__setitem__)
    fake = ModuleType("vllm")
    fake.ModelRegistry = registry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    register()
    assert known == dict.fromkeys(ARCHITECTURES, MODEL_CLASS)
    known[ARCHITECTURES[0]] = "another plugin's"
    register()
    assert known[ARCHITECTURES[0]] == "another plugin's"
    # vLLM's rule for drafters of method "dflash".
    assert ARCHITECTURES[1] == f"DFlash{ARCHITECTURES[0]}"


# The class itself, on stand-ins


class Body(nn.Module):
    """What ``DFlashQwen3Model`` gives to the plugin's subclass: fused k and v rows, the norm, a place for the keys."""

    def __init__(self, drafter):
        super().__init__()
        self.drafter, self.stored = drafter, []
        self.embed_tokens = drafter.target.embed
        weights = [layer.attention.qkv.weight[layer.attention.heads * 8 :] for layer in drafter.layers]
        self._fused_kv_weight, self._fused_kv_bias = torch.cat(weights), None
        self._k_norm_weights = torch.stack([layer.attention.k_norm.weight for layer in drafter.layers])
        self._hidden_norm_weight, self._rms_norm_eps = drafter.hidden_norm.weight, drafter.config.body.rms_norm_eps

    def _project_context_kv(self, *arguments):
        raise AssertionError("the subclass has its own")

    _normalize_context_k = _project_context_kv

    def precompute_and_store_context_kv(self, states, positions, slots=None):
        keys, values = self._project_context_kv(states, states.shape[0], 2, 1, 8)
        self.stored.append((self._normalize_context_k(keys), values))


class CausalLM(nn.Module):
    """What ``DFlashQwen3ForCausalLM`` gives."""

    model_cls: Any

    drafter: Any = None

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.config = vllm_config.draft
        self.model = self.model_cls(self.drafter)
        self.draft_id_to_target_id = None
        self.loaded = {}

    def combine_hidden_states(self, features):
        return self.drafter.fc(features)

    def forward(self, input_ids, positions, inputs_embeds=None):
        return input_ids[:, None].float()

    def compute_logits(self, hidden):
        return self.drafter.logits(hidden)

    def load_weights(self, weights):
        self.loaded = dict(weights)


def rms_norm(out, x, weight, eps):
    """As on a CPU, where of several rows of weights only the first is used."""
    weight = weight if weight.dim() == 1 else weight[0]
    out.copy_(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight)


@pytest.fixture
def model(exported, monkeypatch):
    """The plugin's class, built as vLLM builds it, on the stand-ins."""
    drafter, config, tensors = exported
    monkeypatch.setattr(CausalLM, "drafter", drafter)
    names: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm._custom_ops": {"rms_norm": rms_norm},
        "vllm.config": {"VllmConfig": object},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.qwen3_dflash": {"DFlashQwen3ForCausalLM": CausalLM, "DFlashQwen3Model": Body},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["vllm"])["_custom_ops"] = sys.modules["vllm._custom_ops"]
    vllm_dfly = import_module("dllm.bridge.vllm_dfly")
    # Built on stand-ins: nobody else may get it.
    del sys.modules["dllm.bridge.vllm_dfly"], vars(dllm.bridge)["vllm_dfly"]
    settings = SimpleNamespace(
        draft=config,
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    built = vllm_dfly.DFlyQwen3ForCausalLM(vllm_config=settings)
    built.load_weights(tensors.items())
    return built, vllm_dfly, settings


@pytest.mark.parametrize("copied", [False, True], ids=["the combined rows", "a slice of a copy of them"])
def test_each_layer_s_keys_and_values_are_those_that_the_drafter_feeds(model, exported, copied):
    built, drafter = model[0], exported[0]
    features = torch.randn(9, drafter.config.feature_width)
    shared = built.combine_hidden_states(features)
    assert torch.equal(shared, drafter.fc(features))
    rows, first = shared, 0
    if copied:
        buffer = torch.zeros(20, 16)
        buffer[:9] = shared
        rows, first = buffer[4:9], 4
    built.precompute_and_store_context_kv(rows, torch.arange(first, 9))
    keys, values = built.model.stored[-1]
    cos, sin = torch.ones(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)
    for layer, fused in zip(range(2), drafter.fuse(features[None, first:]), strict=True):
        attention = drafter.layers[layer].attention
        expected = context_keys(attention, fused, cos, sin)
        torch.testing.assert_close(keys[layer].transpose(0, 1), expected[0][0])
        torch.testing.assert_close(values[layer].transpose(0, 1), expected[1][0])


def test_the_class_drafts_what_the_drafter_drafts_for_each_request(model, exported):
    built, drafter = model[0], exported[0]
    drafter.head_candidates = None
    mask = drafter.config.mask_token_id
    anchors = torch.tensor([7, 21])
    ids = torch.full((2, DRAFTS + 1), mask)
    ids[:, 0] = anchors
    # The proposer's buffer is longer than the batch.
    buffer = torch.cat([ids.flatten(), torch.zeros(4, dtype=torch.int64)]).int()
    built(buffer, torch.arange(len(buffer)))
    drafter.reset(2, 16)
    drafter.feed(Context(torch.randn(2, 3, drafter.config.feature_width), torch.ones(2, 3, dtype=torch.bool)))
    hidden = drafter.block(anchors, DRAFTS + 1)[:, 1:]
    logits = built.compute_logits(hidden.flatten(0, 1))
    expected = drafter.propose(None, anchors, DRAFTS).tokens
    assert torch.equal(logits.argmax(-1).view(2, DRAFTS), expected)
    assert torch.equal(built.get_top_tokens(hidden.flatten(0, 1)).view(2, DRAFTS), expected)
    # The buffer is read when the logits are, as with a replayed graph.
    buffer[0] = 30
    drafter.reset(2, 16)
    assert not torch.equal(built.compute_logits(hidden.flatten(0, 1))[:DRAFTS], logits[:DRAFTS])


def test_the_class_hands_every_other_tensor_on_and_refuses_what_it_would_draft_wrongly(model, exported):
    built, module, settings = model
    tensors = exported[2]
    own = {name for name in tensors if name.startswith(("hidden_correction.", "layer_fusion_weights"))}
    assert set(built.loaded) == set(tensors) - own and len(own) == 6
    built.block_ids = torch.zeros(6)
    with pytest.raises(ValueError, match="hidden_states must hold 5 slots a request: got 3"):
        built.compute_logits(torch.zeros(3, 16))
    with pytest.raises(ValueError, match="hidden_states must hold at most 32 tokens: got 33"):
        built.combine_hidden_states(torch.zeros(33, 32))
    with pytest.raises(ValueError, match="context_states must be rows below 32: got 30 on"):
        built.precompute_and_store_context_kv(torch.zeros(64, 16)[30:40], torch.arange(10))
    settings.speculative_config = SimpleNamespace(num_speculative_tokens=8)
    with pytest.raises(ValueError, match=r"num_speculative_tokens must be at most 7 \(block_size 8\): got 8"):
        module.DFlyQwen3ForCausalLM(vllm_config=settings)
    settings.speculative_config = SimpleNamespace(num_speculative_tokens=3, num_speculative_tokens_per_batch_size=[3])
    with pytest.raises(NotImplementedError, match="one number of drafts"):
        module.DFlyQwen3ForCausalLM(vllm_config=settings)
