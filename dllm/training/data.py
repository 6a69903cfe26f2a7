"""Training documents: token ids with the length of their prompt, from token archives, JSONL and text files.

An archive (``.npz``) is either a stream of conversations closed by id 49151 without their fixed header (key ``tokens``, uint16), or
what ``Documents.save`` wrote (keys ``tokens``, ``offsets``, ``prompt_lengths``).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dllm.evals.loops import loops

CONVERSATION_END = 49151
"""Id that closes a conversation in a token stream; not part of it."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Many documents in three arrays, so that worker processes share them.

    tokens uint16 or int32 [total]; offsets int64 [n + 1]; prompt_lengths int32 [n] (0: plain text); sentence_ends: ids that end a
    sentence, or None.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    sentence_ends: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.prompt_lengths) + 1 or (len(self.tokens) != self.offsets[-1]):
            raise ValueError(
                f"offsets must have one entry more than prompt_lengths and end at the number of tokens: got {len(self.offsets)}, "
                f"{len(self.prompt_lengths)}, {len(self.tokens)}"
            )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """(token ids of document ``index``, its prompt length)."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]], int(self.prompt_lengths[index])

    @classmethod
    def of(
        cls, documents: Iterable[tuple[Sequence[int] | np.ndarray, int]], sentence_ends: np.ndarray | None = None
    ) -> Documents:
        """From (token ids, prompt length) pairs; those with fewer than 2 tokens or nothing after the prompt are left out."""
        kept = [(np.asarray(ids), prompt) for ids, prompt in documents if len(ids) >= max(2, prompt + 1)]
        lengths = np.array([len(ids) for ids, _ in kept], np.int64)
        tokens = np.concatenate([ids for ids, _ in kept]) if kept else np.zeros(0, np.int64)
        small = np.uint16 if tokens.size == 0 or int(tokens.max()) < 2**16 else np.int32
        return cls(
            tokens.astype(small),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([prompt for _, prompt in kept], np.int32),
            sentence_ends,
        )

    def select(self, indices: Sequence[int] | np.ndarray) -> Documents:
        """The documents at ``indices``, in that order."""
        return Documents.of((self[int(i)] for i in indices), self.sentence_ends)

    def save(self, path: str | Path) -> None:
        """Write a compressed archive, whole or not at all."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial")
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, tokens=self.tokens, offsets=self.offsets, prompt_lengths=self.prompt_lengths)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def load_documents(source: str | Path, tokenizer: Any) -> Documents:
    """Documents of one file: ``.npz``, ``.jsonl`` (also ``.gz``) or text.

    A JSONL line holds ``messages`` (a chat whose last message is the assistant's), ``prompt`` and ``answer`` (or ``question`` and
    ``answer``), or ``text``. A text file is one document a paragraph group of at most about 2,000 characters. tokenizer: a
    transformers tokenizer.

    Raises FileNotFoundError, or ValueError naming the file and the line that cannot be used.
    """
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"source must be a file: {path} does not exist")
    ends = sentence_ends(tokenizer)
    if path.suffix == ".npz":
        found = _read_archive(path, tokenizer, ends)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        found = Documents.of(_read_jsonl(path, tokenizer), ends)
    else:
        found = Documents.of(((ids, 0) for ids in _read_text(path, tokenizer)), ends)
    if len(found) == 0:
        raise ValueError(f"{path} must hold at least one document with text to learn: got none")
    return found


def held_out(documents: Documents, count: int = 500) -> tuple[Documents, Documents]:
    """(for training, for measuring): the last ``count`` documents are never trained on."""
    if not 0 < count < len(documents):
        raise ValueError(f"count must be in [1, {len(documents)}): got {count}")
    cut = len(documents) - count
    return documents.select(np.arange(cut)), documents.select(np.arange(cut, len(documents)))


def without_loops(documents: Documents) -> Documents:
    """The documents whose answer does not loop (see ``dllm/evals/loops.py``: an 8-gram three times)."""

    def fine(index: int) -> bool:
        tokens, prompt_length = documents[index]
        return not loops(tokens[prompt_length:].tolist())

    return documents.select([i for i in range(len(documents)) if fine(i)])


def load_prompts(source: str | Path, tokenizer: Any) -> list[list[int]]:
    """Token ids of chat prompts, up to where the answer begins.

    From an archive: the user's turns; from JSONL: ``messages`` without a last assistant message, ``question`` or ``prompt``.
    """
    path = Path(source)
    if path.suffix == ".npz":
        documents = _read_archive(path, tokenizer, None)
        return [documents[i][0][: documents[i][1]].tolist() for i in range(len(documents)) if documents[i][1]]
    prompts = []
    for number, line in _json_lines(path):
        messages = line.get("messages") or _user(line.get("question") or line.get("prompt"))
        if not messages:
            raise ValueError(f"{path}, line {number}: expected messages, question or prompt: got {sorted(line)}")
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        prompts.append(_template(tokenizer, messages, True))
    return prompts


def chat_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids that the chat template puts before and after a first user turn, the opening of the answer included."""
    header, footer = _around(_template(tokenizer, _user("x"), True), tokenizer.encode("x", add_special_tokens=False))
    return header.tolist(), footer.tolist()


def sentence_ends(tokenizer: Any) -> np.ndarray:
    """Ids of ordinary tokens that end a sentence: their text ends with . ! ? or a line break."""
    special = set(tokenizer.all_special_ids)
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return np.array(
        [i for i, text in enumerate(texts) if i not in special and text.endswith((".", "!", "?", "\n"))], np.int64
    )


def _read_archive(path: Path, tokenizer: Any, ends: np.ndarray | None) -> Documents:
    try:
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} must be an npz archive: {error}") from error
    if "tokens" not in arrays:
        raise ValueError(f"{path} must hold the key 'tokens': got {sorted(arrays)}")
    tokens = arrays["tokens"]
    if "offsets" in arrays:
        return Documents(tokens, arrays["offsets"], arrays["prompt_lengths"], ends)
    # The fixed header: everything of the template before the user's words.
    header, footer = (np.array(ids) for ids in chat_frame(tokenizer))
    stops = np.flatnonzero(tokens == CONVERSATION_END)
    begins = np.concatenate([[0], stops[:-1] + 1])
    return Documents.of(
        ((_conversation(header, tokens[a:b], footer)) for a, b in zip(begins, stops, strict=True)), ends
    )


def _conversation(header: np.ndarray, turn: np.ndarray, footer: np.ndarray) -> tuple[np.ndarray, int]:
    """One conversation with its header; the prompt ends where the first ``footer`` does."""
    first = np.flatnonzero(turn == footer[0])
    at = next((int(i) for i in first if np.array_equal(turn[i : i + len(footer)], footer)), len(turn))
    return np.concatenate([header, turn]), len(header) + at + len(footer)


def _around(ids: list[int], inner: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """What stands before and after the last occurrence of ``inner``."""
    for at in range(len(ids) - len(inner), -1, -1):
        if ids[at : at + len(inner)] == inner:
            return np.array(ids[:at]), np.array(ids[at + len(inner) :])
    raise ValueError("tokenizer's chat template must leave the user's words in one piece: it does not")


def _read_jsonl(path: Path, tokenizer: Any) -> Iterable[tuple[list[int], int]]:
    for number, line in _json_lines(path):
        if isinstance(line.get("messages"), list):
            messages = line["messages"]
            if not messages or messages[-1].get("role") != "assistant":
                raise ValueError(f"{path}, line {number}: the last of messages must be the assistant's")
        elif isinstance(line.get("answer"), str) and (line.get("prompt") or line.get("question")):
            messages = [
                *_user(line.get("prompt") or line.get("question")),
                {"role": "assistant", "content": line["answer"]},
            ]
        elif isinstance(line.get("text"), str):
            yield tokenizer.encode(line["text"], add_special_tokens=False), 0
            continue
        else:
            raise ValueError(
                f"{path}, line {number}: expected messages, prompt and answer, or text: got {sorted(line)}"
            )
        prompt = _template(tokenizer, messages[:-1], True)
        answer = tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
        yield [*prompt, *answer, tokenizer.eos_token_id], len(prompt)


def _json_lines(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: must be JSON: {error}") from error
            if not isinstance(line, dict):
                raise ValueError(f"{path}, line {number}: must be a JSON object: got {type(line).__name__}")
            yield number, line


def _read_text(path: Path, tokenizer: Any, max_characters: int = 2000) -> Iterable[list[int]]:
    """Paragraphs joined into documents, cut where a paragraph alone is longer."""
    piece = ""
    for paragraph in [*path.read_text(encoding="utf-8").split("\n\n"), None]:
        if piece and (paragraph is None or len(piece) + len(paragraph) > max_characters):
            for at in range(0, len(piece), max_characters):
                yield tokenizer.encode(piece[at : at + max_characters], add_special_tokens=False)
            piece = ""
        if paragraph and paragraph.strip():
            piece = f"{piece}\n\n{paragraph}" if piece else paragraph


def _user(text: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}] if isinstance(text, str) and text else []


def _template(tokenizer: Any, messages: list[dict[str, str]], generation: bool) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
    return tokenizer.encode(text, add_special_tokens=False)
