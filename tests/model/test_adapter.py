"""Adapters: the folded decoder is the unfolded one, its base stays untouched, and another base or a damaged file is named."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from dllm.model.adapter import (
    AdapterConfig,
    LoRALinear,
    adapter_state,
    add_lora,
    fingerprint,
    fold,
    load_adapter_state,
    projections,
    same_base,
)
from dllm.model.decoder import Decoder
from dllm.pipeline import DiffusionLM
from dllm.types import Attend
from tests.tiny import MASK, tiny_decoder

RANK, ALPHA = 3, 6.0


def biased_decoder(seed=0):
    """A decoder with every optional tensor that an adapter has to leave alone or replace."""
    torch.manual_seed(seed)
    decoder = Decoder(replace(tiny_decoder().config, qkv_bias=True, qk_norm=True, tie_embeddings=True))
    for parameter in decoder.parameters():
        parameter.data.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.3)
    return decoder.eval().requires_grad_(False)


def test_updates_merged_into_the_weights_give_the_same_outputs_and_gradients():
    torch.manual_seed(4)
    base = torch.nn.Linear(10, 12)
    layers = [LoRALinear(base, [6, 4, 2], ["q", "k", "v"], RANK, ALPHA) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, merged in zip(layers, (False, True), strict=True):
        for i, b in enumerate(layer.lora_b):
            b.data.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(i)))
        layer.lora_a.data.copy_(torch.randn(9, 10, generator=torch.Generator().manual_seed(7)))
        layer.merged = merged
    x, given = torch.randn(5, 10), torch.randn(5, 12)
    results = []
    for layer in layers:
        inputs = x.clone().requires_grad_()
        out = layer(inputs)
        out.backward(given)
        results.append((out.detach(), inputs.grad, layer.lora_a.grad, *(b.grad for b in layer.lora_b)))
    assert results[0][0].abs().max() > 1
    for plain, merged in zip(*results, strict=True):
        torch.testing.assert_close(plain, merged, rtol=1e-5, atol=1e-5)


def trained(base, seed=1):
    """A LoRA model whose trainable tensors have moved, rounded as they are saved."""
    model = add_lora(base, RANK, ALPHA, MASK)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
                parameter.copy_(parameter.bfloat16().float())
    return model.eval()


def config_for(base, **changes):
    values: dict[str, Any] = dict(base="tiny", base_fingerprint=fingerprint(base), rank=RANK, alpha=ALPHA, spec={})
    return AdapterConfig(**(values | changes))


def logits_of(decoder, masked=True):
    ids = torch.randint(0, 60, (2, 11), generator=torch.Generator().manual_seed(5))
    hidden = (torch.arange(11) > 6).expand(2, -1) if masked else None
    position = torch.arange(11).expand(2, -1)
    with torch.no_grad():
        embeds = decoder.embed(ids, hidden, MASK)
        return decoder.head(decoder(None, position, None, Attend.block_causal(position, 4), embeds=embeds))


@pytest.mark.parametrize("make", [tiny_decoder, biased_decoder], ids=["plain", "bias-qk-norm-tied"])
def test_the_folded_decoder_equals_the_unfolded_one(make):
    base = make()
    model = trained(base)
    folded = fold(base, config_for(base), adapter_state(model))
    torch.testing.assert_close(logits_of(folded), logits_of(model), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits_of(folded), logits_of(base), atol=0.1)
    # Without masked rows the mask's embedding plays no part and the rest still differs from the base.
    torch.testing.assert_close(logits_of(folded, False), logits_of(model, False), atol=1e-4, rtol=1e-4)


def test_a_fresh_adapter_changes_nothing_but_the_mask_row_is_its_own():
    base = tiny_decoder()
    model = add_lora(base, RANK, ALPHA, MASK)
    torch.testing.assert_close(logits_of(model), logits_of(base))
    assert model.mask_embedding is not None
    model.mask_embedding.data.add_(1.0)
    assert torch.equal(base.embed_tokens.weight, tiny_decoder().embed_tokens.weight)


def test_what_is_trained_is_what_is_saved():
    model = add_lora(biased_decoder(), RANK, ALPHA, MASK)
    state = adapter_state(model)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(value.numel() for value in state.values()) == trainable
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    kinds = {name.rsplit(".", 3)[-3] for name in state if "lora" in name}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_the_adapted_decoder_shares_embedding_and_head_and_leaves_the_base_as_it_was():
    base = tiny_decoder()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    folded = fold(base, config_for(base), adapter_state(trained(base)))
    assert folded.embed_tokens.weight.data_ptr() == base.embed_tokens.weight.data_ptr()
    assert folded.head_weight.data_ptr() == base.head_weight.data_ptr()
    for (_, attribute, _, _), (owner, _, _, _), (base_owner, _, _, _) in zip(
        projections(folded), projections(folded), projections(base), strict=True
    ):
        assert getattr(owner, attribute).weight.data_ptr() != getattr(base_owner, attribute).weight.data_ptr()
    assert folded.norm.weight.data_ptr() != base.norm.weight.data_ptr()
    assert base.mask_embedding is None
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    assert not any(p.requires_grad for p in folded.parameters())


def test_training_the_copy_leaves_the_base_as_it_was():
    base = tiny_decoder()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    trained(base)
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())


def test_a_saved_adapter_goes_back_into_a_model_to_go_on_training():
    base = tiny_decoder()
    model = trained(base)
    state = adapter_state(model)
    again = add_lora(base, RANK, ALPHA, MASK)
    load_adapter_state(again, state)
    assert all(torch.equal(value, state[name]) for name, value in adapter_state(again).items())
    torch.testing.assert_close(logits_of(again), logits_of(model))


@pytest.mark.parametrize("change", ["embedding", "shape", "norm", "fine-tuned"])
def test_another_base_raises_naming_both(change):
    base = tiny_decoder()
    state, config = adapter_state(trained(base)), config_for(base)
    other = tiny_decoder()
    if change == "embedding":
        other.embed_tokens.weight[3, 3] += 0.5
    elif change == "fine-tuned":
        generator = torch.Generator().manual_seed(9)
        for layer in other.layers:
            for parameter in layer.parameters():
                parameter.mul_(1 + 0.02 * torch.randn(parameter.shape, generator=generator))
    elif change == "norm":
        other.norm.weight[0] += 0.5
    else:
        other = tiny_decoder(layers=3)
    with pytest.raises(ValueError, match="adapter belongs to another base: it was made for 'tiny'"):
        fold(other, config, state)


def test_the_fingerprint_is_of_the_weights_and_not_of_where_they_lie_or_their_dtype():
    found = fingerprint(tiny_decoder())
    assert fingerprint(tiny_decoder()) == found
    for dtype in (torch.bfloat16, torch.float16):
        assert same_base(found, fingerprint(tiny_decoder().to(dtype)))
        assert same_base(fingerprint(tiny_decoder().to(dtype)), found)
    assert not same_base(found, fingerprint(tiny_decoder(1)))


@pytest.mark.parametrize("load", ["fold", "load_adapter_state"])
def test_missing_and_unknown_tensors_are_named(load):
    base = tiny_decoder()
    state = adapter_state(trained(base))

    def use(tensors):
        if load == "fold":
            fold(base, config_for(base), tensors)
        else:
            load_adapter_state(add_lora(base, RANK, ALPHA, MASK), tensors)

    missing = dict(state)
    del missing["layers.1.mlp.down_proj.lora_B.weight"]
    with pytest.raises(ValueError, match="missing \\['layers.1.mlp.down_proj.lora_B.weight'\\] \\(1\\)"):
        use(missing)
    with pytest.raises(ValueError, match="unknown \\['extra'\\] \\(1\\)"):
        use({**state, "extra": torch.zeros(1)})


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj.lora_A.weight", "norm.weight", "mask_embedding"])
def test_a_misshapen_tensor_is_named(name):
    base = tiny_decoder()
    state = adapter_state(trained(base))
    state[name] = state[name][..., :-1]
    with pytest.raises(ValueError, match=f"{name.removesuffix('.lora_A.weight')}.* must be"):
        fold(base, config_for(base), state)


def test_a_rank_of_zero_raises():
    with pytest.raises(ValueError, match="rank must be >= 1: got 0"):
        add_lora(tiny_decoder(), 0, 1.0, MASK)


def test_splits_must_add_up():
    with pytest.raises(ValueError, match="splits must add up to 6: got \\[4, 1\\]"):
        LoRALinear(torch.nn.Linear(3, 6), [4, 1], ["a", "b"], 2, 1.0)


def test_the_config_is_written_and_read_back(tmp_path):
    config = config_for(tiny_decoder(), spec={"mask_token_id": MASK}, training={"steps": 3})
    config.save(tmp_path)
    assert AdapterConfig.load(tmp_path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[1]", "format must be 'dllm-adapter-1': got 'list'"),
        ('{"format": "other"}', "format must be 'dllm-adapter-1': got 'other'"),
        ('{"format": "dllm-adapter-1", "rank": 3}', "missing"),
        (json.dumps({**asdict(AdapterConfig("b", {}, 1, 1.0, {})), "strange": 1}), "strange"),
    ],
)
def test_a_damaged_config_is_named(tmp_path, text, message):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"adapter_config.json.*{message}"):
        AdapterConfig.load(tmp_path)


def test_a_family_is_refused_for_an_adapter(tmp_path):
    config_for(tiny_decoder()).save(tmp_path)
    with pytest.raises(ValueError, match="family must be None for an adapter.*: got 'zz'"):
        DiffusionLM.from_pretrained(tmp_path, family="zz")
