"""Checkpoints in safetensors: what is written comes back, and nothing damaged is taken for a checkpoint."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from dllm.model.weights import load_state, save_safetensors


@pytest.fixture
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(64, 8),
        "layers.0.q.weight": torch.randn(8, 8, dtype=torch.bfloat16),
        "layers.0.k.weight": torch.randn(8, 8).to(torch.float16),
        "steps": torch.tensor(7),
        "mask": torch.rand(5) < 0.5,
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_small_checkpoint_is_one_file_that_comes_back_as_it_was(tmp_path: Path, state: dict[str, Tensor]) -> None:
    written = save_safetensors(state, tmp_path / "a" / "b", metadata={"made_by": "a test"})
    assert written == [tmp_path / "a" / "b" / "model.safetensors"]
    assert names(tmp_path / "a" / "b") == ["model.safetensors"]
    assert_equal(load_state(tmp_path / "a" / "b"), state)
    assert_equal(load_state(written[0]), state)
    with safetensors.safe_open(written[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt", "made_by": "a test"}


def test_a_large_checkpoint_is_split_into_files_below_the_limit(tmp_path: Path) -> None:
    state = {f"layers.{i}.weight": torch.full((100 + i,), float(i)) for i in range(40)}
    limit = 4000
    written = save_safetensors(state, tmp_path, max_shard_bytes=limit, metadata={"note": "x" * 500})
    shards, index = written[:-1], written[-1]
    assert len(shards) > 3
    assert all(shard.stat().st_size <= limit for shard in shards)
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert json.loads(index.read_text())["metadata"]["total_size"] == sum(4 * v.numel() for v in state.values())
    assert_equal(load_state(tmp_path), state)
    assert_equal(load_state(index), state)


def test_only_a_tensor_that_is_too_large_by_itself_exceeds_the_limit(tmp_path: Path) -> None:
    state = {"a": torch.zeros(10), "large": torch.ones(5000), "b": torch.zeros(10)}
    *shards, _ = save_safetensors(state, tmp_path, max_shard_bytes=2000)
    assert [list(safetensors.torch.load_file(shard)) for shard in shards] == [["a"], ["large"], ["b"]]
    assert_equal(load_state(tmp_path), state)


def test_transformers_reads_our_shards(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
    )
    model = LlamaForCausalLM(config)
    config.save_pretrained(tmp_path)
    assert len(save_safetensors(model.state_dict(), tmp_path, max_shard_bytes=20_000)) > 3
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_equal(dict(loaded.state_dict()), dict(model.state_dict()))


def test_views_and_shared_tensors_are_written_out_in_full(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {"all": base, "same": base, "turned": base.T, "column": base[:, 2], "grad": base.clone().requires_grad_()}
    save_safetensors(state, tmp_path)
    assert_equal(load_state(tmp_path), state)


def test_saving_again_replaces_shards_and_index_of_the_earlier_save(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_safetensors({"other": torch.zeros(3)}, tmp_path, name="adapter")
    save_safetensors({f"{i}": torch.zeros(1000) for i in range(5)}, tmp_path, max_shard_bytes=6000)
    save_safetensors({"x": torch.ones(2)}, tmp_path)
    assert names(tmp_path) == ["adapter.safetensors", "config.json", "model.safetensors"]
    assert_equal(load_state(tmp_path, name="model"), {"x": torch.ones(2)})
    save_safetensors({f"{i}": torch.zeros(1000) for i in range(3)}, tmp_path, max_shard_bytes=6000)
    assert "model.safetensors" not in names(tmp_path)
    assert set(load_state(tmp_path, name="model")) == {"0", "1", "2"}


@pytest.mark.parametrize("broken_call", [1, 2, 3])
def test_a_failed_save_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_call: int
) -> None:
    old = {"x": torch.arange(3.0)}
    save_safetensors(old, tmp_path / "used")
    real, calls = safetensors.torch.save_file, []

    def disk_full(tensors: dict[str, Tensor], filename: Path, metadata: dict[str, str]) -> None:
        calls.append(filename)
        real(tensors, filename, metadata=metadata)
        if len(calls) == broken_call:
            filename.write_bytes(filename.read_bytes()[:20])
            raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", disk_full)
    new = {f"{i}": torch.zeros(1000) for i in range(3)}
    with pytest.raises(OSError, match="No space left"):
        save_safetensors(new, tmp_path / "used", max_shard_bytes=6000)
    assert len(calls) == broken_call
    assert names(tmp_path / "used") == ["model.safetensors"]
    assert_equal(load_state(tmp_path / "used"), old)
    calls.clear()
    with pytest.raises(OSError, match="No space left"):
        save_safetensors(new, tmp_path / "not" / "there", max_shard_bytes=6000)
    assert names(tmp_path) == ["used"]


def test_written_files_have_the_mode_of_any_new_file(tmp_path: Path, state: dict[str, Tensor]) -> None:
    (tmp_path / "any").touch()
    (written,) = save_safetensors(state, tmp_path)
    assert written.stat().st_mode == (tmp_path / "any").stat().st_mode


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path, state: dict[str, Tensor], keep: int) -> None:
    (file,) = save_safetensors(state, tmp_path)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        load_state(tmp_path)


def test_a_file_of_something_else_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"<html>404 not found</html>" * 20)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete"):
        load_state(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"must be a folder.*pytorch_model\.bin"):
        load_state(tmp_path / "pytorch_model.bin")


def test_a_missing_or_incomplete_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    state = {f"{i}": torch.zeros(1000) for i in range(3)}
    _, second, _, index = save_safetensors(state, tmp_path, max_shard_bytes=6000)
    safetensors.torch.save_file({"else": torch.zeros(1)}, second)
    with pytest.raises(ValueError, match=rf"{second.name} lacks 1 tensors.*'1'"):
        load_state(tmp_path)
    second.unlink()
    with pytest.raises(ValueError, match=rf"shard .*{second.name} is missing"):
        load_state(tmp_path)
    index.write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    with pytest.raises(ValueError, match="must name files of its own folder"):
        load_state(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": {}}}'])
def test_a_damaged_index_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json must"):
        load_state(tmp_path)


def test_a_folder_must_hold_one_checkpoint_or_the_name_says_which(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load_state(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="must hold a .safetensors"):
        load_state(tmp_path)
    save_safetensors({"a": torch.zeros(1)}, tmp_path, name="a")
    save_safetensors({"b": torch.zeros(1)}, tmp_path, name="b")
    with pytest.raises(ValueError, match="several checkpoints, name must say which"):
        load_state(tmp_path)
    assert set(load_state(tmp_path, name="b")) == {"b"}
    with pytest.raises(ValueError, match=r"must hold c\.safetensors"):
        load_state(tmp_path, name="c")


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    good = {"a": torch.zeros(1)}
    with pytest.raises(ValueError, match="tensors must hold at least one"):
        save_safetensors({}, tmp_path)
    with pytest.raises(TypeError, match="tensors must map names to torch.Tensor: got 'a': list"):
        save_safetensors({"a": [1.0]}, tmp_path)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="dense values: a is on meta"):
        save_safetensors({"a": torch.zeros(1, device="meta")}, tmp_path)
    with pytest.raises(ValueError, match="max_shard_bytes must be >= 1: got 0"):
        save_safetensors(good, tmp_path, max_shard_bytes=0)
    with pytest.raises(TypeError, match="metadata must map str to str: got 'rank': 4"):
        save_safetensors(good, tmp_path, metadata={"rank": 4})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="name must be a file name"):
        save_safetensors(good, tmp_path, name=f"x{os.sep}y")
    assert names(tmp_path) == []
