"""The table of measured products: what it chooses, keeps and refuses."""

import pytest
import torch
import torch.nn.functional as F

from dllm.kernels.linear_table import (
    CUBLAS,
    Choice,
    LinearShape,
    LinearTable,
    bucket,
    candidates,
    measure,
    table_path,
)
from dllm.kernels.skinny_linear import LinearConfig, choose_config

LLADA_DOWN = LinearShape("linear", 32, 4096, 12288)


def test_rows_are_rounded_up_to_a_bucket_and_more_than_64_have_none():
    assert [bucket(n) for n in (1, 2, 8, 9, 32, 33, 64)] == [1, 8, 8, 16, 32, 64, 64]
    with pytest.raises(ValueError, match="rows must be <= 64: got 65"):
        bucket(65)


def test_what_was_not_measured_follows_the_fixed_rule(tmp_path):
    table = LinearTable.load("cpu", tmp_path)
    assert table.choose(LLADA_DOWN) == Choice(choose_config(32, 4096, 12288))


@pytest.mark.parametrize(
    "shape", [LLADA_DOWN, LinearShape("swiglu", 5, 12288, 4096), LinearShape("linear", 1, 960, 576)]
)
def test_candidates_are_distinct_begin_with_the_rule_and_leave_each_part_some_inputs(shape):
    found = candidates(shape)
    assert found[0] == choose_config(shape.rows, shape.outputs, shape.inputs, 2, shape.kind == "swiglu")
    assert len(set(found)) == len(found) > 3
    assert all(c.splits == 1 or shape.inputs // c.splits >= c.block_i for c in found)


def test_the_fastest_is_chosen_saved_and_read_again(tmp_path):
    table = LinearTable.load("cpu", tmp_path)
    tried = []
    best = candidates(LinearShape("linear", 32, 4096, 12288))[2]

    def time_of(shape, config):
        tried.append((shape, config))
        return 1.0 if config == best else 2.0

    table.fill([LinearShape("linear", 20, 4096, 12288), LLADA_DOWN], "cpu", time_of=time_of)
    # One bucket, measured once, at its full size.
    assert {shape.rows for shape, _ in tried} == {32}
    assert len(tried) == len(set(tried)) == len(candidates(LLADA_DOWN)) + 1
    table.fill([LinearShape("linear", 1, 8, 8)], "cpu", time_of=lambda shape, config: 3.0 if config is None else 4.0)
    table.save()
    again = LinearTable.load("cpu", tmp_path)
    assert again.choices == table.choices
    assert again.choose(LLADA_DOWN) == Choice(best, 1.0)
    assert again.choose(LinearShape("linear", 1, 8, 8)) == Choice(None, 3.0)
    assert CUBLAS in again.path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == [again.path.name]


def test_the_file_is_named_for_device_and_versions(tmp_path):
    name = table_path(torch.device("cpu"), tmp_path).name
    assert torch.__version__ in name
    assert "triton-" in name


def test_a_file_that_is_no_table_is_refused_by_name(tmp_path):
    path = table_path(torch.device("cpu"), tmp_path)
    for text in (
        "{",
        '{"linear/1/8/8/bfloat16": {"time_us": 1}}',
        '{"a": {"config": {"block": 1}, "time_us": 1}}',
        "[1]",
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match="must be a table of measured products"):
            LinearTable.load("cpu", tmp_path)


def test_the_default_folder_is_below_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DLLM_CACHE", str(tmp_path))
    assert table_path(torch.device("cpu")).parent == tmp_path / "linear_table"


def test_products_of_the_table_are_the_products(tmp_path):
    table = LinearTable.load("cpu", tmp_path)
    x, weight = torch.randn(2, 3, 8), torch.randn(6, 8)
    assert torch.equal(table.linear(x, weight, residual=torch.ones(2, 3, 6)), F.linear(x, weight) + 1)
    assert torch.equal(table.partial(x, weight), F.linear(x, weight).view(1, 6, 6))
    assert torch.equal(table.swiglu(x, *weight.chunk(2)), F.silu(F.linear(x, weight[:3])) * F.linear(x, weight[3:]))


def test_measuring_needs_a_cuda_device_and_a_shape_must_make_sense():
    with pytest.raises(ValueError, match="device must be a CUDA device to measure on: got cpu"):
        measure(LLADA_DOWN, None, "cpu")
    with pytest.raises(ValueError, match="kind must be linear or swiglu: got 'qkv'"):
        LinearShape("qkv", 1, 8, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be >= 1: got 0, 8, 8"):
        LinearShape("linear", 0, 8, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "swiglu"])
def test_the_measured_choice_gives_the_product_on_the_gpu(kind, tmp_path):
    table = LinearTable.load("cuda", tmp_path)
    shape = LinearShape(kind, 16, 576, 576)
    table.fill([shape], "cuda", replays=2)
    chosen = table.choose(shape)
    assert chosen.time_us is not None
    assert 0 < chosen.time_us < 1000
    x = torch.randn(16, 576, device="cuda").bfloat16()
    weight = torch.randn(1152, 576, device="cuda").bfloat16()
    gate, up = weight.chunk(2)
    for config in (chosen.config, LinearConfig(64, 64, 2, 4, 3), None):
        table.choices[shape.key] = Choice(config)
        g = x.double() @ gate.double().T
        expected = g if kind == "linear" else F.silu(g) * (x.double() @ up.double().T)
        out = table.linear(x, gate) if kind == "linear" else table.swiglu(x, gate, up)
        assert (out.double() - expected).abs().max() <= 1e-2 * expected.abs().max()
