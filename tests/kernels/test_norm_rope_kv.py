"""Norms, rotation with KV write and SwiGLU: the kernels against their references in fp32 and against the decoder's own modules."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dllm.kernels import norm_rope_kv as kernels
from dllm.model.decoder import Attention, DecoderConfig, RMSNorm, inverse_frequencies
from dllm.model.kv_store import KVStore

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Absolute, for values of order 1 (up to about 5). fp32: order of the sums and rsqrt; bf16: one rounding, 2^-8 relative on the GPU,
# 2^-7 in the interpreter, which cuts the lower bits off; fp16: 2^-11.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)


def made(shape, seed, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def nan(shape, dtype, device):
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_close(out, expected, dtype=torch.float32):
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert (out.float() - expected.float()).abs().max() <= TOLERANCE[dtype]


def angles(batch, queries, half, seed, device):
    position = torch.randint(0, 5000, (batch, queries, 1), generator=torch.Generator().manual_seed(seed)).to(device)
    angle = position * 10000.0 ** -(torch.arange(half, device=device) / half)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 63), (2, 257)])
def test_norm_and_residual_norm_equal_fp32_truth(device, dtype, rows, width):
    x, residual = made((rows, width), 0, dtype, device), made((rows, width), 1, dtype, device)
    weight = made((width,), 2, dtype, device)
    out = nan((rows, width), dtype, device)
    assert kernels.rms_norm_triton(x, weight, 1e-5, out) is out
    assert_close(out, F.rms_norm(x.float(), (width,), weight.float(), 1e-5), dtype)
    outs = nan((rows, width), dtype, device), nan((rows, width), dtype, device)
    total, normed = kernels.add_rms_norm_triton(x, residual, weight, 1e-5, out=outs)
    assert_close(total, x.float() + residual.float(), dtype)
    # The norm reads the sum as the next layer will: rounded.
    assert_close(normed, F.rms_norm(total.float(), (width,), weight.float(), 1e-5), dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_may_be_slices_and_parts_are_summed_in_order(device):
    wide, weight = made((2, 3, 90), 0, device=device), made((35,), 1, device=device)
    x = wide[..., 20:55]
    assert_close(kernels.rms_norm_triton(x, weight, 1e-5), kernels.rms_norm_reference(x, weight, 1e-5))
    transposed = made((35, 4), 2, device=device).T
    assert_close(
        kernels.rms_norm_triton(transposed, weight, 1e-5), kernels.rms_norm_reference(transposed, weight, 1e-5)
    )
    parts = made((3, 6, 35), 3, device=device)
    for out, expected in zip(
        kernels.add_rms_norm_triton(parts, x, weight, 1e-5, partial=True),
        kernels.add_rms_norm_reference(parts, x, weight, 1e-5, partial=True),
        strict=True,
    ):
        assert_close(out, expected)
    gate_up = made((2, 5, 26), 4, device=device)
    assert_close(
        kernels.swiglu_triton(gate_up, partial=True, dtype=torch.bfloat16),
        F.silu(gate_up.sum(0)[:, :13]) * gate_up.sum(0)[:, 13:],
        torch.bfloat16,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 63), (2, 257)])
def test_swiglu_equals_fp32_truth_on_a_slice_of_something_wider(device, dtype, rows, width):
    gate_up = made((rows, 2 * width + 4), 0, dtype, device)[:, 3:-1]
    out = nan((rows, width), dtype, device)
    kernels.swiglu_triton(gate_up, out=out)
    gate, up = gate_up.float().chunk(2, -1)
    assert_close(out, F.silu(gate) * up, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half", "norm", "dtype"),
    [
        (4, 2, 16, 8, False, torch.float32),
        (4, 2, 16, 8, True, torch.bfloat16),
        (3, 1, 24, 12, True, torch.float32),
        (3, 3, 20, 6, True, torch.float16),
        (0, 2, 16, 8, False, torch.bfloat16),
    ],
)
def test_rotation_and_write_equal_fp32_truth(device, heads, kv_heads, head_dim, half, norm, dtype):
    batch, queries, capacity = 2, 3, 5
    qkv = made((batch, queries, (heads + 2 * kv_heads) * head_dim + 8), 0, dtype, device)[..., :-8]
    cos, sin = angles(batch, queries, half, 1, device)
    weights = {"q_weight": made((head_dim,), 2, dtype, device), "k_weight": made((head_dim,), 3, dtype, device)}
    generator = torch.Generator().manual_seed(4)
    rows = torch.stack([torch.randperm(capacity, generator=generator)[:queries] for _ in range(batch)]).to(device)
    valid = (torch.rand(batch, queries, generator=generator) < 0.6).to(device)
    stores = [KVStore(1, batch, kv_heads, capacity, head_dim, dtype, device) for _ in range(2)]
    results = []
    for store, call, given in (
        (
            stores[0],
            kernels.rope_write_triton,
            {"out": nan((batch, queries, heads + 2 * kv_heads, head_dim), dtype, device)},
        ),
        (stores[1], kernels.rope_write_reference, {}),
    ):
        keys, values = store.view(0)
        where: dict[str, Any] = dict(rows=rows, valid=valid, keys=keys, values=values)
        results.append(call(qkv, cos, sin, heads, kv_heads, eps=1e-6, **where, **(weights if norm else {}), **given))
    for out, expected in zip(*results, strict=True):
        assert out.shape == expected.shape
        if out.numel():
            assert_close(out, expected, dtype)
    written = torch.zeros(batch, capacity + 1, dtype=torch.bool, device=device)
    written.scatter_(1, torch.where(valid, rows, capacity), True)
    assert_close(stores[0].data, stores[1].data, dtype)
    # Nothing but the valid rows is touched, the store's spare row neither.
    untouched = ~written
    untouched[:, capacity] = True
    assert (stores[0].data[0, :, :, 0, :, 0][untouched.expand(2, -1, -1)] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_it_is_the_decoders_projection_and_store_write(device, qk_norm):
    config = DecoderConfig(16, 32, 64, 1, 4, 2, 8, 128, qk_norm=qk_norm, qkv_bias=True)
    torch.manual_seed(0)
    attention = Attention(config).to(device)
    norms: dict[str, Any] = {}
    if qk_norm:
        assert attention.q_norm is not None and attention.k_norm is not None
        torch.nn.init.normal_(attention.q_norm.weight)
        torch.nn.init.normal_(attention.k_norm.weight)
        norms = dict(q_weight=attention.q_norm.weight, k_weight=attention.k_norm.weight)
    x = made((2, 3, 32), 0, device=device)
    positions = torch.tensor([[3, 4, 5], [90, 91, 92]], device=device)
    angle = positions[:, None, :, None].float() * inverse_frequencies(config).to(device)
    angle = torch.cat([angle, angle], -1)
    q, k, v = attention.project(x, angle.cos(), angle.sin())
    rows, valid = positions % 7, torch.tensor([[True, True, False], [True, False, True]], device=device)
    store, ours = (KVStore(1, 2, 2, 7, 8, device=device) for _ in range(2))
    store.write(0, rows, valid, k, v)
    half = angle[:, 0, :, :4]
    keys, values = ours.view(0)
    with torch.no_grad():
        for call in (kernels.rope_write_triton, kernels.rope_write):
            ours.data.zero_()
            found = call(
                attention.qkv(x), half.cos(), half.sin(), 4, 2, eps=config.rms_norm_eps,
                rows=rows, valid=valid, keys=keys, values=values, **norms,
            )  # fmt: skip
            for out, expected in zip(found, (q, k, v), strict=True):
                assert_close(out, expected)
            assert_close(keys, store.view(0)[0])
            assert_close(values, store.view(0)[1])
        skip = 4 * 8
        ours.data.zero_()
        new_k, new_v = kernels.context_write(
            attention.qkv(x)[..., skip:], half.cos(), half.sin(), 2, rows, valid, keys, values,
            k_weight=norms.get("k_weight"), eps=config.rms_norm_eps,
        )  # fmt: skip
        assert_close(new_k, k)
        assert_close(new_v, v)
        assert_close(keys, store.view(0)[0])


def test_off_cuda_the_public_functions_are_the_decoders_modules():
    norm, x = RMSNorm(12, 1e-5), made((2, 12), 0)
    torch.nn.init.normal_(norm.weight)
    with torch.no_grad():
        assert_close(kernels.rms_norm(x, norm.weight, 1e-5), norm(x))
        total, normed = kernels.add_rms_norm(x, x, norm.weight, 1e-5)
        assert_close(total, 2 * x)
        assert_close(normed, norm(2 * x))
        assert_close(kernels.swiglu(x), F.silu(x[:, :6]) * x[:, 6:])


def test_wrong_arguments_are_named():
    x, cos = made((1, 2, 64), 0), made((1, 2, 4), 1)
    with pytest.raises(ValueError, match=r"weight must be \[64\]"):
        kernels.rms_norm(x, made((63,), 0), 1e-5)
    with pytest.raises(ValueError, match="x must have the residual's shape"):
        kernels.add_rms_norm(x[:, :1], x, made((64,), 0), 1e-5)
    with pytest.raises(ValueError, match="even width"):
        kernels.swiglu(x[..., :63])
    with pytest.raises(ValueError, match="must be fp32"):
        kernels.swiglu(x.bfloat16(), partial=True)
    with pytest.raises(ValueError, match="qkv must be 10 heads"):
        kernels.rope_write(x, cos, cos, 4, 3)
    with pytest.raises(ValueError, match="rows, valid, keys and values must be given together"):
        kernels.rope_write(x, cos, cos, 4, 2, rows=torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="q_weight and k_weight must be given together"):
        kernels.rope_write(x, cos, cos, 4, 2, q_weight=made((8,), 0))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "width", "ffn"),
    [(32, 32, 128, 4096, 12288), (32, 8, 128, 2560, 9728), (9, 3, 64, 576, 1536)],
    ids=["llada-8b", "qwen3-4b", "smollm2-135m"],
)
@pytest.mark.parametrize("rows", [1, 32, 257])
def test_real_shapes_equal_the_truth_on_the_gpu(heads, kv_heads, head_dim, width, ffn, rows):
    dtype = torch.bfloat16
    x, residual = made((1, rows, width), 0, dtype, "cuda"), made((1, rows, width), 1, dtype, "cuda")
    weight = made((width,), 2, dtype, "cuda")
    total, normed = kernels.add_rms_norm_triton(x, residual, weight, 1e-5)
    assert_close(total, x.float() + residual.float(), dtype)
    # Relative: a norm's outputs times a normal weight reach about 20.
    expected = F.rms_norm(total.float(), (width,), weight.float(), 1e-5)
    assert ((normed.float() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
    gate_up = made((1, rows, 2 * ffn), 3, dtype, "cuda")
    expected = kernels.swiglu_reference(gate_up.float())
    assert ((kernels.swiglu_triton(gate_up).float() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
    qkv = made((1, rows, (heads + 2 * kv_heads) * head_dim), 4, dtype, "cuda")
    cos, sin = angles(1, rows, head_dim // 2, 5, "cuda")
    stores = [KVStore(1, 1, kv_heads, 1000, head_dim, dtype, "cuda") for _ in range(2)]
    where = torch.arange(700, 700 + rows, device="cuda")[None]
    found = [
        call(qkv, cos, sin, heads, kv_heads, rows=where, valid=where % 3 > 0, keys=s.view(0)[0], values=s.view(0)[1])
        for call, s in ((kernels.rope_write_triton, stores[0]), (kernels.rope_write_reference, stores[1]))
    ]
    for out, expected in zip(*found, strict=True):
        assert ((out.float() - expected.float()).abs() <= 2**-7 * expected.float().abs() + 1e-6).all()
    assert (stores[0].data.float() - stores[1].data.float()).abs().max() <= TOLERANCE[dtype]
