"""Products of a few rows: the kernel against a product in fp64, for every variant, split or not."""

import pytest
import torch
import torch.nn.functional as F

from dllm.kernels import norm_rope_kv, skinny_linear
from dllm.kernels.skinny_linear import LinearConfig, choose_config, skinny_linear_partial_triton, skinny_linear_triton
from dllm.kernels.skinny_linear import skinny_swiglu_triton as swiglu_triton

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Relative to the largest output. fp32: the order of the sum over I, and three tf32 parts on the GPU; fp16: one rounding, 2^-11; bf16:
# one rounding, 2^-8 on the GPU, 2^-7 in the interpreter, which cuts the lower bits off.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 6e-4}
SMALL = LinearConfig(16, 32, 1, 4, 2)
SPLIT = LinearConfig(32, 16, 3, 4, 2)


def made(shape, seed, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(out, expected, dtype):
    assert torch.isfinite(out).all()
    return (out.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", [SMALL, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 63, 257), (33, 40, 64), (63, 17, 1)])
def test_the_product_with_bias_and_residual_is_right_for_odd_sizes(device, config, rows, outputs, inputs):
    x, weight = made((rows, inputs), 0, device=device), made((outputs, inputs), 1, device=device)
    bias, residual = made((outputs,), 2, device=device), made((rows, outputs), 3, device=device)
    expected = x.double() @ weight.double().T
    for b, r in ((None, None), (bias, None), (None, residual), (bias, residual)):
        out = torch.full((rows, outputs), float("nan"), device=device)
        assert skinny_linear_triton(x, weight, b, r, config, out) is out
        assert close(out, expected + (0 if b is None else b.double()) + (0 if r is None else r.double()), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", [SMALL, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu_takes_the_two_halves_of_a_fused_weight_without_a_copy(device, config, biased):
    fused, x = made((2 * 41, 70), 0, device=device), made((2, 3, 70), 1, device=device)
    gate, up = fused.chunk(2)
    bias, up_bias = (made((41,), 2, device=device), made((41,), 3, device=device)) if biased else (None, None)
    out = torch.full((2, 3, 41), float("nan"), device=device)
    swiglu_triton(x, gate, up, bias, up_bias, config, out)
    g, u = (x.double() @ w.double().T + (0 if b is None else b.double()) for w, b in ((gate, bias), (up, up_bias)))
    assert close(out, F.silu(g) * u, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [SMALL, SPLIT, None], ids=["whole", "split", "chosen"])
def test_low_precision_is_accumulated_in_fp32_and_rounded_once(device, dtype, config):
    x, weight = made((5, 200), 0, dtype, device), made((48, 200), 1, dtype, device)
    residual = made((5, 48), 2, dtype, device)
    out = skinny_linear_triton(x, weight, None, residual, config)
    assert out.dtype == dtype
    assert close(out, x.double() @ weight.double().T + residual.double(), dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_and_weights_may_be_slices_of_something_wider(device):
    x, weight = made((6, 100), 0, device=device)[::2, 10:80], made((90, 100), 1, device=device)[5:40, 20:90]
    residual = made((3, 70), 2, device=device)[:, 30:65]
    out = skinny_linear_triton(x, weight, None, residual, SMALL)
    assert close(out, x.double() @ weight.double().T + residual.double(), torch.float32)
    transposed = made((70, 3), 3, device=device).T
    assert close(skinny_linear_triton(transposed, weight), transposed.double() @ weight.double().T, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_the_parts_are_summed_by_the_kernel_that_reads_them(device):
    x, weight = made((4, 96), 0, device=device), made((64, 96), 1, device=device)
    part = skinny_linear_partial_triton(x, weight, SPLIT)
    assert part.shape == (3, 4, 64)
    assert close(part.sum(0), x.double() @ weight.double().T, torch.float32)
    gain, residual = made((64,), 2, device=device), made((4, 64), 3, device=device)
    whole = skinny_linear_triton(x, weight, config=SPLIT)
    assert all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(
            norm_rope_kv.add_rms_norm_triton(part, residual, gain, 1e-6, partial=True),
            norm_rope_kv.add_rms_norm_triton(whole, residual, gain, 1e-6),
            strict=True,
        )
    )


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_inputs_give_the_same_bits(device):
    x, weight = made((7, 128), 0, device=device), made((40, 128), 1, device=device)
    first = skinny_linear_triton(x, weight, config=SPLIT)
    for _ in range(20 if device == "cuda" else 1):
        assert torch.equal(first, skinny_linear_triton(x, weight, config=SPLIT))


@pytest.mark.parametrize(("outputs", "inputs"), [(12288, 4096), (4096, 12288), (960, 576), (576, 1536), (7, 5)])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("pair", [False, True])
def test_the_chosen_configuration_gives_every_program_work(rows, outputs, inputs, pair):
    config = choose_config(rows, outputs, inputs, 2, pair)
    steps = -(-inputs // config.block_i)
    assert config.splits == 1 or config.splits * -(-steps // config.splits) < steps + config.splits
    assert -(-outputs // config.block_o) * config.splits <= max(-(-outputs // config.block_o), 2 * 132)


def test_off_cuda_and_for_many_rows_the_product_is_pytorchs():
    x, weight = made((65, 8), 0), made((3, 8), 1)
    assert torch.equal(skinny_linear.skinny_linear(x, weight), F.linear(x, weight))
    assert torch.equal(skinny_linear.skinny_linear_partial(x, weight), F.linear(x, weight)[None])
    assert torch.equal(
        skinny_linear.skinny_swiglu(x, weight, weight), F.silu(F.linear(x, weight)) * F.linear(x, weight)
    )
    with pytest.raises(ValueError, match="at most 64 rows for the kernel: got 65"):
        skinny_linear_triton(x, weight)


def test_wrong_arguments_are_named():
    x, weight = made((2, 8), 0), made((3, 8), 1)
    with pytest.raises(ValueError, match=r"weight must be \[O, 8\]"):
        skinny_linear.skinny_linear(x, weight[:, :7])
    with pytest.raises(ValueError, match="weight must have x's dtype"):
        skinny_linear.skinny_linear(x, weight.bfloat16())
    with pytest.raises(ValueError, match=r"residual must be \[2, 3\]"):
        skinny_linear.skinny_linear(x, weight, residual=x)
    with pytest.raises(ValueError, match="gate_bias and up_bias must be given together"):
        skinny_linear.skinny_swiglu(x, weight, weight, made((3,), 0))
    with pytest.raises(ValueError, match="block_o must be a power of two >= 16: got 24"):
        LinearConfig(24, 64, 1, 4, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 32, 63])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(12288, 4096), (4096, 12288), (4096, 4096), (6144, 2560), (2560, 9728), (960, 576), (576, 1536), (3072, 576)],
)
def test_real_shapes_equal_the_truth_on_the_gpu(rows, outputs, inputs):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(2 * outputs, inputs, generator=generator, device="cuda") / inputs**0.5).bfloat16()
    gate, up = weight.chunk(2)
    residual = torch.randn(rows, outputs, generator=generator, device="cuda").bfloat16()
    g, u = x.double() @ gate.double().T, x.double() @ up.double().T
    out = torch.full((rows, outputs), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert close(skinny_linear_triton(x, gate, None, residual, out=out), g + residual.double(), torch.bfloat16)
    assert close(swiglu_triton(x, gate, up), F.silu(g) * u, torch.bfloat16)
