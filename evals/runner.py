"""Runs a task on a system: every sample once, saved as it is made, with its score, its cost and what a judge says of it.

A sample's record depends on the sample, the settings and its seed alone. Batches are cut from the fixed list of a rank's samples,
and a batch that was half written is run again as a whole, so that an interrupted run repeats the very same calls; only the
missing lines of it are written. Ranks of a data-parallel run take every `world`-th sample, each into its own shard.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.loops import loops
from dllm.evals.run_store import Line, RunStore
from dllm.evals.statistics import Interval, bootstrap_mean, bootstrap_ratio
from dllm.evals.task import Sample, Task

if TYPE_CHECKING:
    from dllm.evals.judge import Judge
    from dllm.evals.systems import Answer, System

REPLAYS = "replays.json"
COUNTS = ("nfe", "guide_nfe", "draft_nfe", "useful_tokens", "positions")
"""Numbers of `Stats` that a record holds, beside the accept lengths."""


@dataclass(frozen=True)
class Extras:
    """What is measured beside the score.

    judge: scores what was written; judge_tokenizer: None where the judge reads the ids of the measured model.
    execute: runs code (`dllm.evals.execution.execute`) for tasks that need it. reference_likelihood: also the likelihood of each
    true middle under the measured model. replays: of so many samples, the first ones, the denoise steps are recorded, in calls of
    their own that are not timed.
    """

    judge: Judge | None = None
    judge_tokenizer: Any = None
    execute: Callable[..., Any] | None = None
    reference_likelihood: bool = False
    replays: int = 0


def run_task(
    task: Task,
    samples: Sequence[Sample],
    system: System,
    folder: Path,
    settings: Mapping[str, Any],
    *,
    batch_size: int = 1,
    seed: int = 0,
    extras: Extras | None = None,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Answer, score and save the samples of this rank that the folder lacks; True if the run is then complete.

    settings: JSON values that say what runs; with the task, the seed and the versions they are what a folder is known by.
    seed: of the noise; each sample draws from a seed of its own, made of this one and its id.
    progress: called with (samples of this rank done, of all) after each batch.
    Raises ValueError for no samples, ids that are not unique, bad batch_size, rank or world, and a folder of another run.
    """
    extras = extras or Extras()
    if extras.judge_tokenizer is not None and extras.judge_tokenizer.get_vocab() == system.tokenizer.get_vocab():
        extras = replace(extras, judge_tokenizer=None)
    if not samples:
        raise ValueError(f"task {task.name} must give at least one sample: got none")
    if len({sample.id for sample in samples}) < len(samples):
        raise ValueError(f"task {task.name} must give samples of unique ids")
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1: got {batch_size}")
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, {world}): got {rank}")
    if task.needs_execution and extras.execute is None:
        raise ValueError(f"task {task.name} runs the code that the model writes: allow it with --allow-code-execution")
    run = {
        "task": {name: getattr(task, name) for name in ("name", "kind", "metric", "dataset", "split")},
        "samples_digest": _digest([asdict(sample) for sample in samples]),
        "settings": {**settings, "seed": seed},
        "versions": {**versions(), **system.describe()},
    }
    mine = list(range(rank, len(samples), world))
    with RunStore(folder, run, len(samples), rank) as store:
        done = store.done()
        finished = sum(i in done for i in mine)
        for start in range(0, len(mine), batch_size):
            batch = mine[start : start + batch_size]
            missing = [i for i in batch if i not in done]
            if not missing:
                continue
            if progress is not None and start == 0:
                progress(finished, len(mine))
            seeds = [sample_seed(seed, samples[i].id) for i in batch]
            answers = system.answer([samples[i] for i in batch], seeds)
            scores = _judged(system, extras, [samples[i] for i in batch], answers)
            for i, answer, score, own in zip(batch, answers, scores, seeds, strict=True):
                if i in done:
                    continue
                record = _record(task, samples[i], system, answer, own, extras) | score
                store.append(Line(i, record, _time(answer)))
            finished += len(missing)
            if progress is not None:
                progress(finished, len(mine))
        complete = store.finish(lambda records: summary(records, task.metric))
        if rank == 0 and extras.replays and not (store.folder / REPLAYS).is_file():
            _save_replays(system, samples[: extras.replays], seed, store.folder)
    return complete


def sample_seed(seed: int, sample_id: str) -> int:
    """The noise seed of a sample: 62 bits of a digest, so that neither order nor batch nor limit change it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()[:8], "big") >> 2


def summary(records: Iterator[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Means with bootstrap intervals over samples: each score, tokens per forward, length, loops, likelihoods."""
    columns: dict[str, list[float]] = {}
    for record in records:
        row = {f"score.{name}": value for name, value in record["scores"].items()}
        row |= {name: record[name] for name in (*COUNTS, "loops")}
        if record["log_likelihood"] is not None:
            row["log_likelihood_per_token"] = record["log_likelihood"] / record["scored_tokens"]
        if record.get("reference_log_likelihood") is not None:
            row["reference_log_likelihood"] = record["reference_log_likelihood"]
        for name, value in row.items():
            columns.setdefault(name, []).append(float(value))
    found: dict[str, Any] = {
        "metric": metric,
        "means": {name: asdict(bootstrap_mean(values)) for name, values in sorted(columns.items())},
        "totals": {name: int(sum(columns[name])) for name in COUNTS},
    }
    if sum(columns["nfe"]) > 0:
        found["tokens_per_forward"] = asdict(bootstrap_ratio(columns["useful_tokens"], columns["nfe"]))
    return found


def headline(result: Mapping[str, Any]) -> Interval | None:
    """The headline score of a result.json, or None for a task without one."""
    found = result["summary"]["means"].get(f"score.{result['task']['metric']}")
    return None if found is None else Interval(**found)


def versions() -> dict[str, Any]:
    """What a number depends on beside its settings: commit (None outside of a checkout), python and the libraries."""
    import torch
    import transformers

    import dllm

    return {
        "dllm": dllm.__version__,
        "commit": _commit(Path(dllm.__file__).resolve().parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@lru_cache(maxsize=1)
def _commit(package: Path) -> str | None:
    """Commit of the checkout that the package is tracked in; "-dirty" behind it where tracked files differ."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=30)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed package may lie inside of somebody else's repository.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty")


def _record(task: Task, sample: Sample, system: System, answer: Answer, seed: int, extras: Extras) -> dict[str, Any]:
    """All of a sample that does not depend on the clock."""
    scores = task.score(sample, answer.text, extras.execute)
    bad = [name for name, value in scores.items() if not math.isfinite(value)]
    if bad:
        raise ValueError(f"scores must be finite: task {task.name}, sample {sample.id}, {bad[0]} is {scores[bad[0]]}")
    given = {
        "prompt": sample.prompt,
        "messages": list(sample.messages),
        "prefix": sample.prefix,
        "suffix": sample.suffix,
    }
    record = {
        "id": sample.id,
        "given": {name: value for name, value in given.items() if value},
        "reference": sample.reference,
        "output": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "seed": seed,
        "scores": {name: float(value) for name, value in scores.items()},
        "loops": loops(answer.token_ids),
        "accept_lengths": list(answer.cost.accept_lengths),
        "true_length": answer.true_length,
        **{name: getattr(answer.cost, name) for name in COUNTS},
    }
    if extras.reference_likelihood and sample.kind == "infill":
        record["reference_log_likelihood"], record["reference_tokens"] = system.reference_log_likelihood(sample)
    return record


def _time(answer: Answer) -> dict[str, Any]:
    return {
        "seconds": answer.seconds,
        "prefill_s": answer.prefill_s,
        "decode_s": answer.decode_s,
        "batch_rows": answer.batch_rows,
    }


def _judged(
    system: System, extras: Extras, samples: Sequence[Sample], answers: Sequence[Answer]
) -> list[dict[str, Any]]:
    """Log-likelihood under the judge, nats; of an infill the fill with its suffix, so that leaving things out wins nothing."""
    if extras.judge is None:
        return [{"log_likelihood": None, "scored_tokens": 0}] * len(samples)
    contexts, continuations = [], []
    other = extras.judge_tokenizer
    for sample, answer in zip(samples, answers, strict=True):
        tokenizer = other or system.tokenizer
        after = tokenizer.encode(sample.suffix, add_special_tokens=False) if sample.suffix else []
        if other is not None or sample.kind == "infill":
            # The judge reads an infill as the text that it is, however the model was asked.
            text = sample.prefix if sample.kind == "infill" else _plain_text(sample)
            context = tokenizer.encode(text, add_special_tokens=False) if text else [tokenizer.eos_token_id]
        else:
            context = system.context_ids(sample)
        written = tokenizer.encode(answer.text, add_special_tokens=False) if other is not None else answer.token_ids
        contexts.append(context)
        continuations.append([*written, *after])
    scores = extras.judge.score(contexts, continuations)
    return [
        {"log_likelihood": score.total if score.num_tokens else None, "scored_tokens": score.num_tokens}
        for score in scores
    ]


def _plain_text(sample: Sample) -> str:
    return sample.prompt or "\n\n".join(str(message["content"]) for message in sample.messages)


def _save_replays(system: System, samples: Sequence[Sample], seed: int, folder: Path) -> None:
    """The denoise steps of some samples, one call each; a system without steps leaves no file."""
    runs = []
    for sample in samples:
        [answer] = system.answer([sample], [sample_seed(seed, sample.id)], history=True)
        if answer.history is None:
            return
        ids = {token for step in answer.history for token in (*step.token_ids, *step.provisional_ids)}
        texts = {token: system.tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in sorted(ids)}
        runs.append(
            {
                "id": sample.id,
                "prompt": _plain_text(sample) or f"{sample.prefix} [...] {sample.suffix}",
                "before": sample.prefix,
                "after": sample.suffix,
                "length": len(answer.token_ids),
                "nfe": answer.cost.nfe,
                "texts": texts,
                "steps": [asdict(step) for step in answer.history],
            }
        )
    write_text_atomic(folder / REPLAYS, json.dumps(runs))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
