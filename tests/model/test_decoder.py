"""The one decoder: transformers' logits on the same weights, and the same hidden states with and without a store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from dllm.families.loading import load_checkpoint
from dllm.model.decoder import Attention, Decoder, DecoderConfig, grouped_mask, inverse_frequencies
from dllm.types import Attend
from tests.tiny import MASK, tiny_decoder

SHAPE: dict[str, Any] = dict(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
HF_CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-one-kv-head": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}),
    "llama-no-gqa": LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
    "llama-wide-heads": LlamaConfig(**SHAPE, head_dim=12),
    "llama3-rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama-theta": LlamaConfig(**SHAPE, rope_parameters=dict(rope_type="default", rope_theta=500.0)),
    "qwen2-qkv-bias": Qwen2Config(**SHAPE),
    "qwen3-qk-norm": Qwen3Config(**SHAPE, head_dim=8),
}


@pytest.fixture(scope="module", params=sorted(HF_CONFIGS))
def pair(request, tmp_path_factory):
    """A transformers model with random weights, norms and biases included, and our decoder of its checkpoint."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(HF_CONFIGS[request.param], dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    ours, spec, _, _ = load_checkpoint(folder, device="cpu")
    assert spec.attention == "causal"
    return theirs, ours


def test_causal_logits_equal_transformers(pair):
    theirs, ours = pair
    ids = torch.randint(0, 67, (3, 50), generator=torch.Generator().manual_seed(1))
    position = torch.arange(50).expand(3, -1)
    with torch.no_grad():
        expected = theirs(ids).logits
        logits = ours.head(ours(ids, position, None, Attend.causal(position)))
    assert expected.std() > 0.5, "flat logits would agree by themselves"
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_taps_are_the_outputs_of_the_layers_that_transformers_calls_hidden_states(pair):
    theirs, ours = pair
    ids = torch.randint(0, 67, (1, 9), generator=torch.Generator().manual_seed(2))
    position = torch.arange(9)[None]
    with torch.no_grad():
        states = theirs(ids, output_hidden_states=True).hidden_states
        hidden, taps = ours(ids, position, None, Attend.causal(position), taps=(0, 1))
    # Transformers' entry 0 is the embedding; its last entry is after the final norm.
    torch.testing.assert_close(taps[0], states[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(taps[1], states[2], atol=1e-4, rtol=0)
    torch.testing.assert_close(hidden, states[-1], atol=1e-4, rtol=0)


@pytest.fixture(params=["gqa", "one-kv-head", "qk-norm-and-bias", "partial-rotary"])
def decoder(request):
    variants: dict[str, dict[str, Any]] = {
        "gqa": {},
        "one-kv-head": dict(num_kv_heads=1),
        "qk-norm-and-bias": dict(qk_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True),
        "partial-rotary": dict(rotary_dim=4),
    }
    torch.manual_seed(3)
    model = Decoder(replace(tiny_decoder().config, **variants[request.param])).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.4)
    return model


@pytest.mark.parametrize("pieces", [[1] * 12, [5, 7], [3, 1, 8], [12]], ids=str)
def test_rows_fed_piece_by_piece_through_the_store_equal_one_forward(decoder, pieces):
    """Block-causal groups of three: the pieces end where blocks end, or the rows of a piece see what they should anyway."""
    ids = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(4))
    position = torch.arange(12).expand(2, -1)
    group = position // (1 if pieces == [1] * 12 or pieces in ([5, 7], [3, 1, 8]) else 3)
    whole = decoder(ids, position, None, Attend.by_group(group))
    store = decoder.new_store(2, 12)
    at, parts = 0, []
    for size in pieces:
        rows = position[:, at : at + size]
        store.extent = at
        attend = Attend.by_group(group[:, at : at + size], None, None, group[:, :at])
        everything = torch.ones_like(rows, dtype=torch.bool)
        parts.append(decoder(ids[:, at : at + size], rows, store, attend, rows=rows, write=everything))
        at += size
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


def test_a_row_that_is_not_to_be_written_leaves_the_store_as_it_was(decoder):
    store = decoder.new_store(1, 6)
    store.extent = 0
    rows = torch.tensor([[0, 3, 4]])
    write = torch.tensor([[True, False, True]])
    decoder(torch.tensor([[5, 6, 7]]), rows, store, Attend.causal(rows), rows=rows, write=write)
    used = store.data[:, :, 0, :, :6].abs().sum((0, 1, 2, 4)) > 0
    assert used.tolist() == [True, False, False, False, True, False]


def test_attention_is_the_formula_with_each_key_head_shared_by_its_group_of_queries():
    config = DecoderConfig(8, 24, 8, 1, 6, 2, 4, 32)
    attention = Attention(config)
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 7, 4), torch.randn(2, 2, 7, 4)
    mask = torch.rand(2, 5, 7) < 0.6
    mask[..., 0] = True
    mixed = attention.attend(q, k, v, grouped_mask(mask, 3))
    for head in range(6):
        scores = q[:, head] @ k[:, head // 3].transpose(-1, -2) / 2
        law = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        torch.testing.assert_close(mixed[..., head * 4 : head * 4 + 4], law @ v[:, head // 3], atol=1e-5, rtol=1e-5)


def test_masked_rows_take_the_masks_input_row_whatever_their_id():
    decoder = tiny_decoder()
    ids, masked = torch.tensor([[5, 6, MASK]]), torch.tensor([[False, True, False]])
    table = decoder.embed_tokens.weight
    assert torch.equal(decoder.embed(ids, masked, MASK)[0], table[[5, MASK, MASK]])
    decoder.mask_embedding = torch.nn.Parameter(torch.full((32,), 0.5))
    own = decoder.embed(ids, masked, MASK)[0]
    assert torch.equal(own[[0, 2]], table[[5, MASK]])
    assert (own[1] == 0.5).all()
    assert torch.equal(decoder.embed(ids)[0], table[[5, 6, MASK]])


def test_a_model_without_a_mask_row_needs_a_mask_id():
    with pytest.raises(ValueError, match="mask_token_id must be given"):
        tiny_decoder().embed(torch.tensor([[5]]), torch.tensor([[True]]), None)


def test_ids_and_embeds_exclude_each_other():
    decoder, position = tiny_decoder(), torch.tensor([[0]])
    for kwargs in (dict(ids=None), dict(ids=position, embeds=torch.zeros(1, 1, 32))):
        with pytest.raises(ValueError, match="exactly one of ids and embeds"):
            decoder(positions=position, kv=None, attend=Attend.causal(position), **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_layers=0), "num_layers must be >= 1"),
        (dict(num_kv_heads=3), "num_heads must be a multiple of num_kv_heads 3"),
    ],
)
def test_an_impossible_shape_raises(change, message):
    with pytest.raises(ValueError, match=message):
        replace(tiny_decoder().config, **change)


def test_an_unknown_rope_scaling_raises_and_linear_divides_the_angles():
    config = tiny_decoder().config
    with pytest.raises(ValueError, match="rope_scaling type must be default, linear or llama3: got 'yarn'"):
        inverse_frequencies(replace(config, rope_scaling={"rope_type": "yarn", "factor": 2.0}))
    linear = inverse_frequencies(replace(config, rope_scaling={"type": "linear", "factor": 2.0}))
    torch.testing.assert_close(linear * 2, inverse_frequencies(config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_fp32(dtype):
    decoder = tiny_decoder(sharpness=1.0)
    ids = torch.randint(0, 60, (1, 12), generator=torch.Generator().manual_seed(5))
    position = torch.arange(12)[None]
    exact = decoder.head(decoder(ids, position, None, Attend.causal(position)))
    half = tiny_decoder(sharpness=1.0).to(dtype)
    logits = half.head(half(ids, position, None, Attend.causal(position)))
    assert logits.dtype == dtype
    # Rounding to 8 bits at every product of two layers costs up to a third of the logits' spread; 11 bits an eighth of that.
    limit = 0.3 if dtype == torch.bfloat16 else 0.3 / 8
    assert (logits.float() - exact).abs().max() < limit * exact.std()
