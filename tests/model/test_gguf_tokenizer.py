"""The tokenizer of a GGUF file splits text as the model was trained, whatever the version of transformers."""

from pathlib import Path
from typing import Any

import pytest

from dllm.model.weights import read_gguf_tokenizer

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}<e>{% endfor %}"
TOKENS = ["<u>", "<s>", "<e>", "<user>", *"abc123.", "Ġ", "Ċ", "ab", "ĠĠ", "ĊĊ", "Ġab", "12"]
MERGES = ["a b", "Ġ Ġ", "Ċ Ċ", "Ġ ab", "1 2"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    write(tmp_path / "t.gguf")
    return read_gguf_tokenizer(tmp_path / "t.gguf", model_max_length=77)


def write(path: Path, model: str = "gpt2", pre: str = "smollm") -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 4] + [1] * (len(TOKENS) - 4))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab ab", ["ab", "Ġab"]),
        ("12", ["1", "2"]),
        ("\n\n1.", ["ĊĊ", "1", "."]),
        ("a  3", ["a", "ĠĠ", "3"]),
        ("a  ab", ["a", "Ġ", "Ġab"]),
        ("a<e>\n<user>b", ["a", "<e>", "Ċ", "<user>", "b"]),
        ("", []),
    ],
)
def test_digits_stand_alone_and_are_cut_off_before_the_spaces_are_split(
    tokenizer: Any, text: str, pieces: list[str]
) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text


def test_special_tokens_and_template_are_those_of_the_file(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "saved")
    from transformers import AutoTokenizer

    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert (each.bos_token_id, each.eos_token_id, each.unk_token_id, each.pad_token_id) == (1, 2, 0, None)
        assert each.model_max_length == 77
        assert len(each) == len(TOKENS)
        assert each.decode([1, 4, 3, 2], skip_special_tokens=True) == "a<user>"
        assert each.decode([4, 10, 5]) == "a.b"
        assert each.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<s>ab<e>"


@pytest.mark.parametrize(("key", "value"), [("model", "llama"), ("pre", "llama-bpe")])
def test_another_kind_of_tokenizer_is_refused_by_name(tmp_path: Path, key: str, value: str) -> None:
    write(tmp_path / "t.gguf", **{key: value})
    with pytest.raises(ValueError, match=f"t.gguf: tokenizer.ggml.{key} must be .*: got '{value}'"):
        read_gguf_tokenizer(tmp_path / "t.gguf")
