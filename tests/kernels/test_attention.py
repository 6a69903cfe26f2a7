"""Attention over the store: the kernel against the dense mask of ``Attend`` and PyTorch's attention in fp32, for every constructor."""

from dataclasses import replace

import pytest
import torch
from einops import rearrange

from dllm.kernels.attention import (
    AttentionConfig,
    attention,
    attention_reference,
    attention_triton,
    choose_config,
    plan_tiles_reference,
    plan_tiles_triton,
)
from dllm.model.kv_store import KVStore
from dllm.types import PADDING_GROUP, Attend, pack_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Against fp32 truth on the same inputs. fp32: summation order; bf16: p and the output are rounded to 8 bits (2^-9 relative each) and
# outputs are of order 1; fp16 the same with 11 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
KINDS = ("causal", "bidirectional", "block_causal", "by_group", "random_bits", "window")


def numbers(shape, generator, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=generator).to(device, dtype)


def rules(kind, batch, queries, keys, seed, device="cpu"):
    """An ``Attend`` of each constructor with ragged lengths, holes among the stored keys and padded new rows."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(0, keys + 1, (batch, 1), generator=generator)
    index = torch.arange(keys).expand(batch, -1)
    readable = (index < length) & (torch.rand(batch, keys, generator=generator) < 0.9)
    positions = length + torch.arange(queries)
    valid = torch.rand(batch, queries, generator=generator) < 0.8

    def stored(group):
        return torch.where(readable, group, PADDING_GROUP)

    if kind == "causal":
        attend = Attend.causal(positions, valid, stored(index))
    elif kind == "bidirectional":
        attend = Attend.bidirectional(valid, stored(torch.zeros_like(index)))
    elif kind == "block_causal":
        attend = Attend.block_causal(positions, 5, valid, stored(index // 5))
    else:
        group = torch.randint(-2, 5, (batch, queries), generator=generator)
        low = torch.randint(-4, 3, (batch, queries), generator=generator)
        attend = Attend.by_group(group, low, valid, stored(torch.randint(-3, 6, (batch, keys), generator=generator)))
    if kind == "random_bits":
        seen = (torch.rand(batch, queries, queries, generator=generator) < 0.4) | torch.eye(queries, dtype=torch.bool)
        attend = Attend(attend.key_group, attend.low, attend.group, pack_bits(seen))
    if kind == "window":
        causal = Attend.causal(positions, valid, stored(index))
        attend = replace(causal, window=max(1, keys // 3), key_position=index, position=positions)
    return moved(attend, device)


def moved(attend, device):
    def there(x):
        return None if x is None else x.to(device)

    return Attend(
        attend.key_group.to(device),
        attend.low.to(device),
        attend.group.to(device),
        attend.bits.to(device),
        attend.window,
        there(attend.key_position),
        there(attend.position),
    )


def store_of(batch, kv_heads, keys, head_dim, generator, dtype, device):
    """Keys and values as views of a store with NaN in its spare row, as no code may read it."""
    store = KVStore(2, batch, kv_heads, max(keys, 1), head_dim, dtype, device)
    store.data.copy_(numbers(store.data.shape, generator))
    store.data[..., -1, :] = float("nan")
    store.extent = keys
    return store.view(1)


def inputs(batch, heads, kv_heads, queries, keys, head_dim, seed, dtype=torch.float32, device="cpu"):
    """q, k, v as views of one fused product [B, Q, H + 2K, D], keys and values as views of a store."""
    generator = torch.Generator().manual_seed(seed)
    fused = numbers((batch, queries, heads + 2 * kv_heads, head_dim), generator, dtype, device)
    q, k, v = fused.transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    return q, k, v, *store_of(batch, kv_heads, keys, head_dim, generator, dtype, device)


def truth(q, k, v, attend, keys, values, scale=None):
    return attention_reference(q.float(), k.float(), v.float(), attend, keys.float(), values.float(), scale)


def assert_close(out, expected, dtype):
    assert torch.isfinite(out).all()
    assert (out.float() - expected).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys", "splits"), [(1, 63, 1), (7, 257, 2), (66, 70, 1), (200, 30, 1)])
def test_the_kernel_follows_both_rules_of_every_constructor(device, kind, queries, keys, splits):
    batch, heads, kv_heads, head_dim = 2, 4, 2 if queries < 9 else 1, 16
    for seed in range(3 if device == "cuda" else 1):
        q, k, v, keys_, values = inputs(batch, heads, kv_heads, queries, keys, head_dim, seed, device=device)
        attend = rules(kind, batch, queries, keys, seed, device)
        out = torch.full((batch, queries, heads * head_dim), float("nan"), device=device)
        config = AttentionConfig(16 if queries < 9 else 128, splits, 4, 2)
        assert attention_triton(q, k, v, attend, keys_, values, config=config, out=out) is out
        # A padded row that sees nothing but itself is still finite and equal.
        assert_close(out, truth(q, k, v, attend, keys_, values), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [0, 1, 64, 257, 1000])
def test_the_plan_lists_every_seen_tile_once_and_calls_full_only_what_all_rows_see(device, kind, keys):
    attend = rules(kind, 3, 9, keys, 5, device)
    plan, expected = plan_tiles_triton(attend), plan_tiles_reference(attend)
    assert torch.equal(plan.count, expected.count)
    seen = torch.nn.functional.pad(attend.stored_mask, (0, -keys % plan.tile)).unflatten(2, (-1, plan.tile))
    for b in range(3):
        full, read = plan.count[b].tolist()
        assert torch.equal(plan.index[b, :read], expected.index[b, :read])
        listed = plan.index[b, :read].tolist()
        assert len(set(listed)) == read
        some = seen[b].any(0).any(-1)
        assert set(some.nonzero()[:, 0].tolist()) <= set(listed)
        assert all(seen[b][:, t].all() for t in listed[:full])


@pytest.mark.parametrize("device", DEVICES)
def test_a_tile_that_nobody_sees_is_never_read(device):
    q, k, v, keys, values = inputs(1, 2, 1, 3, 64 * 4, 16, 0, device=device)
    keys, values = keys.clone(), values.clone()
    key_group = torch.zeros(1, 256, dtype=torch.int32, device=device)
    key_group[:, 64:128] = PADDING_GROUP
    key_group[:, 200:] = PADDING_GROUP
    for x in (keys, values):
        x[:, :, 64:128] = float("nan")
    attend = Attend.bidirectional(torch.ones(1, 3, dtype=torch.bool, device=device), key_group)
    plan = plan_tiles_triton(attend)
    assert plan.count.tolist() == [[2, 3]]
    out = attention_triton(q, k, v, attend, keys, values, plan=plan)
    assert_close(out, truth(q, k, v, attend, keys.nan_to_num(), values.nan_to_num()), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_accumulated_in_fp32(device, dtype):
    q, k, v, keys, values = inputs(1, 4, 1, 8, 200, 32, 3, dtype, device)
    attend = rules("block_causal", 1, 8, 200, 3, device)
    out = attention_triton(q, k, v, attend, keys, values)
    assert out.dtype == dtype
    assert_close(out, truth(q, k, v, attend, keys, values), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(64, 9, 3), (80, 2, 2), (24, 3, 1)])
def test_odd_head_widths_and_group_sizes_are_masked(device, head_dim, heads, kv_heads):
    q, k, v, keys, values = inputs(1, heads, kv_heads, 5, 70, head_dim, 1, device=device)
    attend = rules("causal", 1, 5, 70, 1, device)
    out = attention_triton(q, k, v, attend, keys, values, config=AttentionConfig(16, 2, 4, 2))
    assert_close(out, truth(q, k, v, attend, keys, values), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("keys", [64, 128, 64 * 7, 64 * 8 + 5])
def test_shares_of_full_and_of_partly_seen_tiles_give_the_truth(device, keys, splits):
    """With full tiles that follow each other, with an unseen one between them (whose keys are not numbers), and with a last one in part."""
    q, k, v, stored, values = inputs(2, 4, 2, 5, keys, 16, 4, device=device)
    key_group = torch.zeros(2, keys, dtype=torch.int32, device=device)
    key_group[1, 64:128] = PADDING_GROUP
    attend = Attend.bidirectional(torch.ones(2, 5, dtype=torch.bool, device=device), key_group)
    expected = truth(q, k, v, attend, stored, values)
    stored, values = stored.clone(), values.clone()
    stored[1, :, 64:128] = values[1, :, 64:128] = float("nan")
    out = attention_triton(q, k, v, attend, stored, values, config=AttentionConfig(16, splits, 4, 2))
    assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_many_rows_take_several_tiles_and_several_words_of_bits(device):
    q, k, v, keys, values = inputs(1, 2, 1, 130, 40, 16, 2, device=device)
    attend = rules("random_bits", 1, 130, 40, 2, device)
    assert attend.bits.shape[2] == 3
    out = attention_triton(q, k, v, attend, keys, values, config=AttentionConfig(128, 1, 8, 2))
    assert_close(out, truth(q, k, v, attend, keys, values), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_a_scale_other_than_the_default_is_used_and_nothing_stored_is_fine(device):
    q, k, v, _, _ = inputs(2, 2, 2, 6, 1, 16, 4, device=device)
    attend = Attend.causal(torch.arange(6, device=device).expand(2, -1))
    out = attention_triton(q, k, v, attend, scale=0.7)
    assert_close(out, attention_reference(q, k, v, attend, scale=0.7), torch.float32)
    assert not torch.allclose(out, attention_triton(q, k, v, attend), atol=1e-3)


def test_the_public_function_runs_the_reference_on_the_cpu_and_it_is_the_decoders_attention():
    q, k, v, keys, values = inputs(2, 4, 2, 5, 9, 16, 0)
    attend = rules("by_group", 2, 5, 9, 0)
    out = attention(q, k, v, attend, keys, values)
    wide_k, wide_v = (torch.cat(x, 2).repeat_interleave(2, dim=1) for x in ((keys, k), (values, v)))
    score = (q @ wide_k.transpose(2, 3) / 4).masked_fill(~attend.mask()[:, None], float("-inf"))
    expected = rearrange(score.softmax(-1) @ wide_v, "b h q d -> b q (h d)")
    assert torch.allclose(out, expected, atol=1e-5)


def test_wrong_shapes_are_named():
    q, k, v, keys, values = inputs(1, 4, 2, 5, 9, 16, 0)
    attend = rules("causal", 1, 5, 9, 0)
    with pytest.raises(ValueError, match="v must be"):
        attention(q, k, v[:, :1], attend, keys, values)
    with pytest.raises(ValueError, match="keys must hold the 9 stored keys"):
        attention(q, k, v, attend)
    with pytest.raises(ValueError, match="values must be"):
        attention(q, k, v, attend, keys, values[:, :, :4])
    with pytest.raises(ValueError, match="scale must be > 0: got -1"):
        attention(q, k, v, attend, keys, values, scale=-1)
    with pytest.raises(ValueError, match="multiple of k's 2 heads: got 3"):
        attention(q[:, :3], k, v, attend, keys, values)
    with pytest.raises(ValueError, match="plan must be plan_tiles of this attend"):
        attention_triton(q, k, v, attend, keys, values, plan=plan_tiles_reference(rules("causal", 1, 5, 129, 0)))


@pytest.mark.parametrize(
    ("batch", "kv_heads", "rows", "tiles", "head_dim", "splits"),
    [
        # The fastest of a sweep on an H200, or one within 6 % of it.
        (1, 32, 32, 257, 128, 8),
        (1, 8, 128, 257, 128, 16),
        (1, 8, 128, 17, 128, 8),
        (1, 32, 32, 17, 128, 4),
        (1, 3, 96, 17, 64, 8),
        (1, 3, 48, 5, 64, 2),
        # Not swept.
        (64, 32, 32, 257, 128, 1),
        (1, 32, 32, 3, 128, 1),
    ],
)
def test_few_rows_are_split_over_the_keys_and_short_contexts_are_not(batch, kv_heads, rows, tiles, head_dim, splits):
    assert choose_config(batch, kv_heads, rows, tiles, head_dim, 2, 132) == AttentionConfig(64, splits, 4, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(32, 32, 128), (32, 8, 128), (9, 3, 64)],
    ids=["llada-8b", "qwen3-4b", "smollm2-135m"],
)
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 32, 4099), (3, 1, 1024), (1, 128, 16384), (8, 64, 257)])
def test_real_shapes_equal_the_truth_on_the_gpu(kind, heads, kv_heads, head_dim, batch, queries, keys):
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, keys_, values = inputs(batch, heads, kv_heads, queries, keys, head_dim, 0, dtype, "cuda")
        attend = rules(kind, batch, queries, keys, 0, "cuda")
        out = torch.full((batch, queries, heads * head_dim), float("nan"), device="cuda", dtype=dtype)
        attention_triton(q, k, v, attend, keys_, values, out=out)
        assert_close(out, truth(q, k, v, attend, keys_, values), dtype)


@pytest.mark.gpu
def test_one_captured_graph_serves_every_length_up_to_its_number_of_keys():
    q, k, v, keys, values = inputs(1, 8, 2, 8, 1024, 64, 0, torch.float32, "cuda")
    attend = Attend.bidirectional(
        torch.ones(1, 8, dtype=torch.bool, device="cuda"), torch.zeros(1, 1024, dtype=torch.int32, device="cuda")
    )
    attention_triton(q, k, v, attend, keys, values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_triton(q, k, v, attend, keys, values)
    for length in (0, 1, 63, 700, 1024):
        attend.key_group.copy_(torch.where(torch.arange(1024, device="cuda") < length, 0, PADDING_GROUP)[None])
        graph.replay()
        now = Attend(attend.key_group.clone(), attend.low, attend.group, attend.bits)
        assert_close(out, truth(q, k, v, now, keys, values), torch.float32)
