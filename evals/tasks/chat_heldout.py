"""Held-out conversations: does decoding faster change what the model would have said?

Dataset: the user's own. JSONL with ``messages`` (the last one may be the assistant's: then it is the reference), or ``prompt`` or
    ``question`` with an ``answer`` where there is one; or an ``.npz`` of token ids as the trainers read it, of which the last
    ``held_out`` conversations are taken, which are never trained on.
Split: the file as it is, or the npz's held-out end.
Prompt: the conversation up to the assistant's turn, as a chat.
Metric: none. Cost, loops, and likelihood under a judge are the runner's.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dllm.evals.task import Kind, Sample
from dllm.evals.tasks._common import draw, read_rows


class ChatHeldout:
    """held_out: conversations at an npz's end. tokenizer: what wrote its ids, a shipped name, a folder or a hub id."""

    name = "chat_heldout"
    kind: Kind = "generate"
    metric = ""
    needs_execution = False
    dataset = ""
    split = ""

    def __init__(self, held_out: int = 500, tokenizer: str = "smollm2-135m", max_new_tokens: int = 256) -> None:
        if held_out < 1:
            raise ValueError(f"held_out must be >= 1: got {held_out}")
        self.held_out, self.tokenizer, self.max_new_tokens = held_out, tokenizer, max_new_tokens

    def samples(self, data: Path | None = None, limit: int | None = None, seed: int = 0) -> list[Sample]:
        """See `Task`. There is no hub data set: without ``data`` it raises FileNotFoundError."""
        if data is None:
            raise FileNotFoundError(
                f"{self.name} is on no hub: --data must name a JSONL of chats or an npz of token ids"
            )
        path = Path(data)
        if path.suffix == ".npz":
            chats = self._from_archive(path)
        else:
            rows = enumerate(read_rows(path, (), self.dataset, self.split), 1)
            chats = [_chat(row, f"{path}, row {number}") for number, row in rows]
        return [
            Sample(
                id=f"chat/{number}",
                kind="generate",
                messages=messages,
                reference=answer,
                max_new_tokens=self.max_new_tokens,
            )
            for number, (messages, answer) in draw(list(enumerate(chats)), limit, seed)
        ]

    def _from_archive(self, path: Path) -> list[tuple[tuple[dict[str, Any], ...], str]]:
        # Reading token ids takes a tokenizer, and with it torch: only where a file needs it.
        from dllm.target import load_tokenizer, target_folder
        from dllm.training.data import held_out, load_documents

        tokenizer = load_tokenizer(target_folder(self.tokenizer))
        if tokenizer is None:
            raise ValueError(f"tokenizer must name something with a tokenizer: {self.tokenizer} has none")
        mark = "\N{OBJECT REPLACEMENT CHARACTER}"
        asked = [{"role": "user", "content": mark}]
        before, after = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True).split(mark)
        _, measured = held_out(load_documents(path, tokenizer), self.held_out)
        chats: list[tuple[tuple[dict[str, Any], ...], str]] = []
        for i in range(len(measured)):
            ids, prompt_length = measured[i]
            turn = tokenizer.decode(ids[:prompt_length], skip_special_tokens=False)
            if not (turn.startswith(before) and turn.endswith(after)):
                raise ValueError(
                    f"{path}: conversation {i} of the held-out ones is not one user's turn in the template"
                )
            messages = ({"role": "user", "content": turn[len(before) : len(turn) - len(after)]},)
            chats.append((messages, tokenizer.decode(ids[prompt_length:], skip_special_tokens=True)))
        return chats

    def score(self, sample: Sample, output: str, execute: Callable[..., Any] | None = None) -> dict[str, float]:
        """Nothing: the task has no score."""
        return {}

    def check(self, sample: Sample) -> list[tuple[str, float]]:
        """Nothing is known of an open conversation."""
        return []


def _chat(row: dict[str, Any], where: str) -> tuple[tuple[dict[str, Any], ...], str]:
    """(turns up to the assistant's, the answer or "")."""
    messages = row.get("messages")
    if isinstance(messages, list) and messages:
        answer = messages[-1]["content"] if messages[-1].get("role") == "assistant" else ""
        turns = tuple(messages[:-1] if messages[-1].get("role") == "assistant" else messages)
    else:
        question = row.get("prompt") or row.get("question")
        turns = ({"role": "user", "content": question},) if isinstance(question, str) and question else ()
        answer = row.get("answer", "")
    if not turns:
        raise ValueError(f"{where}: expected messages, prompt or question: got {sorted(row)}")
    return turns, answer
