"""Five-sentence story infill: the middle sentence is missing.

Dataset: any five-sentence stories, by ``--data``: rows of prefix, target, suffix, or of sentence1 .. sentence5 as in ROCStories
    (Mostafazadeh et al. 2016, arXiv:1604.01696), whose owners hand the stories out on request only. `aesop_infill` is a free set.
Split: the file as it is.
Prompt: the two sentences before and the two after the gap, apart; the gap begins with the blank that divides sentences.
Metric: rouge_l (F1 over words) and exact_match of the sentence. The log-likelihood of the true sentence needs a model and is
    the runner's to add.
Source: the setting of Donahue et al. 2020 (arXiv:2005.05339) and Gong et al. 2024 (arXiv:2410.17891), which report ROUGE on it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dllm.evals.metrics import exact_match, rouge_l
from dllm.evals.task import Kind, Sample
from dllm.evals.tasks._common import draw, read_rows

SENTENCES = tuple(f"sentence{i}" for i in range(1, 6))


class StoryInfill:
    """Fill in the third of five sentences."""

    name = "story_infill"
    kind: Kind = "infill"
    metric = "rouge_l"
    needs_execution = False
    dataset = ""
    split = ""
    where = "rows of prefix, target, suffix, or of sentence1 .. sentence5, as ROCStories has them (cs.rochester.edu/nlp/rocstories)"

    def samples(self, data: Path | None = None, limit: int | None = None, seed: int = 0) -> list[Sample]:
        """See `Task`. There is no hub data set: without ``data`` it raises FileNotFoundError."""
        if data is None:
            raise FileNotFoundError(f"{self.name} is on no hub: --data must name a JSONL file with {self.where}")
        rows = [
            _parts(row, number, data) for number, row in enumerate(read_rows(data, (), self.dataset, self.split), 1)
        ]
        return [
            Sample(
                id=id_,
                kind="infill",
                prefix=prefix,
                suffix=" " + suffix,
                # The blank belongs to the gap: a tokenizer that glues it to the next word then meets the words it knows.
                reference=" " + target,
                max_new_tokens=64,
            )
            for id_, prefix, target, suffix in draw(rows, limit, seed)
        ]

    def score(self, sample: Sample, output: str, execute: Callable[..., Any] | None = None) -> dict[str, float]:
        """rouge_l and exact_match against the true sentence."""
        return {"rouge_l": rouge_l(sample.reference, output), "exact_match": exact_match(sample.reference, output)}

    def check(self, sample: Sample) -> list[tuple[str, float]]:
        """The true sentence is perfect; nothing, and a word that it does not hold, are worth nothing."""
        return [(sample.reference, 1.0), ("", 0.0), (" Xyzzyqq.", 0.0)]


def _parts(row: dict[str, Any], number: int, data: Path) -> tuple[str, str, str, str]:
    """(id, prefix, target, suffix) without blanks at the ends."""
    if all(name in row for name in SENTENCES):
        first, second, target, fourth, fifth = (str(row[name]).strip() for name in SENTENCES)
        parts = (f"{first} {second}", target, f"{fourth} {fifth}")
    elif all(name in row for name in ("prefix", "target", "suffix")):
        parts = (str(row["prefix"]).strip(), str(row["target"]).strip(), str(row["suffix"]).strip())
    else:
        raise ValueError(
            f"{data}, row {number}: expected prefix, target, suffix or sentence1 .. sentence5: got {sorted(row)}"
        )
    if not parts[1]:
        raise ValueError(f"{data}, row {number}: the target must not be empty")
    return (str(row.get("id") or row.get("storyid") or f"story/{number}"), *parts)
