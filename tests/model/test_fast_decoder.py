"""The forward on the kernels equals ``Decoder``'s, for every kind of layer that it takes, and refuses the others by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dllm.kernels.row_stats import row_stats
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.model.fast_decoder import MAX_ROWS, FastDecoder, unfit
from dllm.model.moe import MoEConfig
from dllm.types import Attend

PLAIN = DecoderConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=512,
)
CONFIGS = {
    "llama": PLAIN,
    "qwen3": replace(PLAIN, qk_norm=True, tie_embeddings=True),
    "qwen2": replace(PLAIN, qkv_bias=True, num_kv_heads=1),
    "llada": replace(PLAIN, num_kv_heads=4),
    "all biases, half rotated": replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True, rotary_dim=4),
}


def decoder_of(config: DecoderConfig, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config).eval().requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return decoder.to(device, dtype)


def forward(model, batch: int = 2, queries: int = 6, stored: int = 21, capacity: int = 32, taps: tuple[int, ...] = ()):
    """A forward of new rows over a filled store, some rows written: (result, store)."""
    torch.manual_seed(1)
    device = model.device
    store = model.new_store(batch, capacity)
    store.data.copy_(torch.randn(store.data.shape))
    store.extent = stored
    rows = torch.arange(stored, stored + queries).expand(batch, -1).contiguous().to(device)
    write = (torch.rand(batch, queries) < 0.5).to(device)
    key_group = torch.randint(0, 4, (batch, stored)).to(device)
    attend = Attend.by_group(torch.randint(0, 5, (batch, queries)).to(device), key_group=key_group)
    embeds = torch.randn(batch, queries, model.config.hidden_size).to(device, model.dtype)
    return model(None, rows, store, attend, taps, embeds=embeds, rows=rows, write=write), store


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_taps_and_stored_rows_equal_the_decoders(name):
    decoder = decoder_of(CONFIGS[name])
    (want, want_taps), want_store = forward(decoder, taps=(0, 2))
    (got, got_taps), got_store = forward(FastDecoder(decoder), taps=(0, 2))
    for ours, truth in ((got, want), *zip(got_taps, want_taps, strict=True)):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=2e-5)
    # The last row is the bin: the decoder writes there, the kernel writes nothing.
    torch.testing.assert_close(got_store.data[..., :-1, :], want_store.data[..., :-1, :], rtol=1e-5, atol=1e-5)


def test_without_a_store_and_with_ids_the_forwards_are_equal():
    decoder = decoder_of(PLAIN)
    ids = torch.arange(12).view(2, 6)
    positions = torch.arange(6).expand(2, -1)
    attend = Attend.causal(positions)
    torch.testing.assert_close(
        FastDecoder(decoder)(ids, positions, None, attend), decoder(ids, positions, None, attend), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("queries", [65, MAX_ROWS + 1])
def test_more_rows_than_the_skinny_products_or_the_attention_kernel_take_give_the_same(queries):
    decoder = decoder_of(PLAIN)
    capacity = 21 + queries
    want, _ = forward(decoder, 1, queries, capacity=capacity)
    got, _ = forward(FastDecoder(decoder), 1, queries, capacity=capacity)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def test_head_stats_equal_the_statistics_of_the_logits():
    decoder = decoder_of(PLAIN)
    hidden, banned = torch.randn(2, 5, 32), torch.zeros(97, dtype=torch.bool)
    banned[3:50] = True
    for temperature, processed in ((0.0, False), (0.7, True)):
        uniform = torch.rand(2, 5) if temperature else None
        got = FastDecoder(decoder).head_stats(hidden, frozenset({"top1"}), banned, uniform, temperature, processed)
        want = row_stats(
            decoder.head(hidden),
            banned=banned,
            uniform=uniform,
            temperature=temperature,
            processed_confidence=processed,
        )
        assert torch.equal(got.token, want.token)
        torch.testing.assert_close(got.confidence, want.confidence)
        torch.testing.assert_close(got.log_total, want.log_total)


def test_what_does_not_fit_is_refused_by_name():
    sparse = Decoder(replace(PLAIN, moe=MoEConfig(num_experts=2, experts_per_token=1, intermediate_size=8)))
    assert "SwiGLU" in str(unfit(sparse))
    with pytest.raises(ValueError, match="dense Decoder on one device: got one where"):
        FastDecoder(sparse)
    hooked = decoder_of(PLAIN)
    hooked.layers[0].register_forward_pre_hook(lambda module, inputs: None)
    assert "hooks" in str(unfit(hooked))
    assert "no plain Decoder" in str(unfit(torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="exactly one of ids and embeds"):
        FastDecoder(decoder_of(PLAIN))(None, torch.zeros(1, 1), None, Attend.causal(torch.zeros(1, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gpu_the_kernels_equal_the_decoder(name, dtype):
    decoder = decoder_of(CONFIGS[name], "cuda", dtype)
    truth = decoder_of(CONFIGS[name], "cuda", torch.float32)
    want, _ = forward(truth)
    got, _ = forward(FastDecoder(decoder))
    # bf16: three layers of roundings to 8 bits.
    tolerance = 1e-4 if dtype == torch.float32 else 8e-2
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)
