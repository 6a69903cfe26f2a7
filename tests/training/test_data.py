"""Documents from every kind of file that training reads."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from dllm.training.data import (
    CONVERSATION_END,
    Documents,
    held_out,
    load_documents,
    load_prompts,
    sentence_ends,
    without_loops,
)
from tests.training.toy import STOP, toy_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode([int(i) for i in ids])


def test_chat_lines_and_texts_become_documents_with_their_prompt_length(tokenizer, tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes."}]},
        {"prompt": "hi", "answer": "yes."},
        {"question": "hi", "answer": "yes."},
        {"text": "once upon."},
    ]
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with gzip.open(packed, "wt", encoding="utf-8") as file:
        file.write("\n".join(map(json.dumps, lines)) + "\n\n")
    for path in (plain, packed):
        found = load_documents(path, tokenizer)
        assert len(found) == 4
        for i in range(3):
            ids, prompt = found[i]
            assert text_of(tokenizer, ids[:prompt]) == "<|im_start|>uhi<|im_end|><|im_start|>a"
            assert text_of(tokenizer, ids[prompt:]) == "yes.<|im_end|>"
        assert text_of(tokenizer, found[3][0]) == "once upon." and found[3][1] == 0


def test_a_token_stream_gets_its_header_back_and_ends_its_prompt_where_the_answer_begins(
    tokenizer, tmp_path: Path
) -> None:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    turns = ["how<|im_end|><|im_start|>aso.<|im_end|>", "why<|im_end|><|im_start|>abecause of"]
    stream = np.array([i for t in turns for i in [*encode(t), CONVERSATION_END]], np.uint16)
    path = tmp_path / "train.npz"
    np.savez(path, tokens=stream)
    found = load_documents(path, tokenizer)
    assert len(found) == 2
    ids, prompt = found[0]
    assert text_of(tokenizer, ids[:prompt]) == "<|im_start|>uhow<|im_end|><|im_start|>a"
    assert text_of(tokenizer, ids[prompt:]) == "so.<|im_end|>"
    assert ids[-1] == STOP and found[1][0][-1] != STOP
    assert [text_of(tokenizer, p) for p in load_prompts(path, tokenizer)] == [
        "<|im_start|>uhow<|im_end|><|im_start|>a",
        "<|im_start|>uwhy<|im_end|><|im_start|>a",
    ]


def test_a_long_text_is_cut_into_documents_that_hold_all_of_it(tokenizer, tmp_path: Path) -> None:
    paragraphs = ["a" * 900, "b" * 900, "c" * 5000, "dd"]
    path = tmp_path / "story.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    found = load_documents(path, tokenizer)
    texts = [text_of(tokenizer, found[i][0]) for i in range(len(found))]
    assert texts[0] == "a" * 900 + "\n\n" + "b" * 900
    assert "".join(texts[1:-1]) == "c" * 5000 and texts[-1] == "dd"
    assert max(map(len, texts)) <= 2000


def test_an_archive_reads_back_what_was_saved(tokenizer, tmp_path: Path) -> None:
    documents = Documents.of([([3, 4, 5, 2], 2), ([7, 8], 0), ([9], 0), ([5, 6], 2)])
    # One token and a prompt without an answer teach nothing.
    assert len(documents) == 2
    documents.save(tmp_path / "a.npz")
    found = load_documents(tmp_path / "a.npz", tokenizer)
    assert [(found[i][0].tolist(), found[i][1]) for i in range(2)] == [([3, 4, 5, 2], 2), ([7, 8], 0)]
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]
    assert load_prompts(tmp_path / "a.npz", tokenizer) == [[3, 4]]


def test_the_last_documents_are_held_out_and_loops_leave() -> None:
    loop = [5, 6, 7, 8, 9, 10, 11, 12] * 3
    documents = Documents.of([([i, 100 + i], 1) for i in range(3, 20)] + [([1, *loop], 1), ([1, 2, *loop[:20]], 2)])
    training, measured = held_out(documents, 4)
    assert len(training) == 15 and len(measured) == 4
    assert measured[0][0].tolist() == [18, 118]
    kept = without_loops(measured)
    assert [kept[i][0][0] for i in range(len(kept))] == [18, 19, 1]
    with pytest.raises(ValueError, match=r"count must be in \[1, 19\): got 19"):
        held_out(documents, 19)


def test_sentence_ends_are_the_ordinary_tokens_that_end_a_sentence(tokenizer) -> None:
    assert [tokenizer.decode([i]) for i in sentence_ends(tokenizer)] == [".", "\n"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "{broken", "a.jsonl, line 1: must be JSON"),
        ("a.jsonl", "[1]", "line 1: must be a JSON object: got list"),
        ("a.jsonl", '{"text": "ok."}\n{"other": 1}', "line 2: expected messages, prompt and answer, or text"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "the last of messages must be the assistant's"),
        ("a.npz", "no archive", "a.npz must be an npz archive"),
        ("a.txt", " \n", "must hold at least one document"),
    ],
)
def test_damaged_files_are_named_with_the_line(tokenizer, tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        load_documents(tmp_path / name, tokenizer)


def test_a_missing_file_and_an_archive_without_tokens_are_named(tokenizer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="source must be a file"):
        load_documents(tmp_path / "none.jsonl", tokenizer)
    np.savez(tmp_path / "b.npz", words=np.zeros(2))
    with pytest.raises(ValueError, match="must hold the key 'tokens'"):
        load_documents(tmp_path / "b.npz", tokenizer)
    with pytest.raises(ValueError, match="offsets must have one entry more"):
        Documents(np.zeros(3), np.array([0, 3]), np.array([1, 1]))
