"""The loading and block-step bench at tiny sizes on a CPU."""

from __future__ import annotations

import json

import pytest
import torch

from dllm.evals.bench_load import SHAPES, main, tensors_of, write_checkpoint
from dllm.pipeline import DiffusionLM


def test_a_written_checkpoint_is_sharded_loads_and_has_the_shapes_of_its_config(tmp_path):
    config = SHAPES["tiny-llada"]
    largest = write_checkpoint(config, tmp_path, shard_bytes=60_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert 0 < largest <= 60_000
    lm = DiffusionLM.from_pretrained(tmp_path, device="cpu")
    assert {p.dtype for p in lm.model.parameters()} == {torch.bfloat16}
    count = sum(torch.Size(shape).numel() for _, shape in tensors_of(config))
    assert count == sum(p.numel() for p in lm.model.parameters())
    assert len(lm.generate(input_ids=[[5, 6]], max_new_tokens=4).sequences[0]) == 4


@pytest.mark.parametrize(("shape", "billions"), [("llada-8b", 8.0), ("dream-7b", 7.6), ("sdar-4b", 4.4)])
def test_the_published_shapes_have_the_published_sizes(shape, billions):
    count = sum(torch.Size(size).numel() for _, size in tensors_of(SHAPES[shape]))
    assert count / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_command_reports_memory_and_medians(tmp_path, capsys):
    out = tmp_path / "bench.json"
    arguments = ["--device", "cpu", "--checkpoint", "tiny-llada", "--shapes", "tiny-dream,tiny-sdar", "--repeats", "2"]
    status = main([*arguments, "--out", str(out)])
    result = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == result
    load = result["load"]
    # At this size the allocator's own pages are more than a shard, so only the report is checked.
    assert status == (0 if load["within_one_shard"] else 1)
    assert load["weight_bytes"] == load["shard_bytes"] > 0
    assert load["load_s"] > 0
    assert [step["shape"] for step in result["steps"]] == ["tiny-dream", "tiny-sdar"]
    assert all(0 < step["forward_ms_min"] <= step["forward_ms"] for step in result["steps"])
    assert all(step["generate_ms"] > 0 for step in result["steps"])


def test_an_unknown_shape_is_a_wrong_command_line(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--device", "cpu", "--shapes", "gpt-5"])
    assert error.value.code == 2
    assert "shapes must be among" in capsys.readouterr().err
