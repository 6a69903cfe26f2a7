"""Runs a task on a system: every sample once, saved as it is made, with its score, its cost and what a judge says of it.

A sample's record depends on the sample, the settings and its seed alone. Batches are cut from the fixed list of a rank's samples,
and a batch that was half written is run again as a whole, so that an interrupted run repeats the very same calls; only the
missing lines of it are written. Ranks of a data-parallel run take every `world`-th sample, each into its own shard.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.grouping import pass_rates, question_means, score_interval
from dllm.evals.loops import loops
from dllm.evals.run_fields import LINE_FIELDS
from dllm.evals.run_store import Line, RunStore
from dllm.evals.statistics import Interval, bootstrap_mean, bootstrap_ratio
from dllm.evals.task import Sample, Task

if TYPE_CHECKING:
    from dllm.evals.judge import Judge
    from dllm.evals.systems import Answer, System

REPLAYS = "replays.json"
DEFERRED = "deferred"
COUNTS = ("nfe", "guide_nfe", "draft_nfe", "useful_tokens", "positions")
"""Numbers of `Stats` that a record holds, beside the accept lengths."""


@dataclass(frozen=True)
class Extras:
    """What is measured beside the score.

    judge: scores what was written; judge_tokenizer: None where the judge reads the ids of the measured model.
    execute: runs code (`dllm.evals.execution.execute`) for tasks that need it. reference_likelihood: also the likelihood of each
    true middle under the measured model. replays: of so many samples, the first ones, the denoise steps are recorded, in calls of
    their own that are not timed. deferred: save outputs and costs without scores, for `dllm.evals.results_score` on a machine
    that may run their code; the run says so until then.
    """

    judge: Judge | None = None
    judge_tokenizer: Any = None
    execute: Callable[..., Any] | None = None
    reference_likelihood: bool = False
    replays: int = 0
    deferred: bool = False


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
    commit: str | None = None,
) -> bool:
    """Answer, score and save the samples of this rank that the folder lacks; True if the run is then complete.

    settings: JSON values that say what runs; with the task, the seed and the versions they are what a folder is known by.
    seed: of the noise; each sample draws from a seed of its own, made of this one and its id.
    progress: called with (samples of this rank done, of all) after each batch. commit: see `versions`.
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
    if task.needs_execution and extras.execute is None and not extras.deferred:
        raise ValueError(f"task {task.name} runs the code that the model writes: allow it with --allow-code-execution")
    run: dict[str, Any] = {
        "task": {name: getattr(task, name) for name in ("name", "kind", "metric", "dataset", "split")},
        "samples_digest": samples_digest(samples),
        "settings": {**settings, "seed": seed},
        "versions": {**versions(commit), **system.describe()},
        **({"scores": DEFERRED} if extras.deferred else {}),
    }
    mine = list(range(rank, len(samples), world))
    with RunStore(folder, run, len(samples), rank, LINE_FIELDS) as store:
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
    """Means with bootstrap intervals over samples: each score, tokens per forward, length, loops, likelihoods.

    Where a question was answered several times, over questions (`question_means`), and the chance that one of k answers passes.
    """
    columns: dict[str, list[float]] = {}
    questions: dict[str, list[str]] = {}
    for record in records:
        row = {f"score.{name}": value for name, value in record["scores"].items()}
        row |= {name: record[name] for name in (*COUNTS, "loops")}
        if record["log_likelihood"] is not None:
            row["log_likelihood_per_token"] = record["log_likelihood"] / record["scored_tokens"]
        if record.get("reference_log_likelihood") is not None:
            row["reference_log_likelihood"] = record["reference_log_likelihood"]
        for name, value in row.items():
            columns.setdefault(name, []).append(float(value))
            questions.setdefault(name, []).append(record.get("question", record["id"]))

    def mean(name: str) -> dict[str, Any]:
        if name.startswith("score."):
            return asdict(score_interval(questions[name], columns[name]))
        return asdict(bootstrap_mean(question_means(questions[name], columns[name])))

    found: dict[str, Any] = {
        "metric": metric,
        "means": {name: mean(name) for name in sorted(columns)},
        "totals": {name: int(sum(columns[name])) for name in COUNTS},
    }
    if sum(columns["nfe"]) > 0:
        counts = [question_means(questions[name], columns[name]) for name in ("useful_tokens", "nfe")]
        found["tokens_per_forward"] = asdict(bootstrap_ratio(*counts))
    rates = pass_rates(questions.get(f"score.{metric}", []), columns.get(f"score.{metric}", []))
    if rates:
        found["pass_at_k"] = {str(k): asdict(rate) for k, rate in rates.items()}
    return found


def headline(result: Mapping[str, Any]) -> Interval | None:
    """The headline score of a result.json, or None for a task without one."""
    found = result["summary"]["means"].get(f"score.{result['task']['metric']}")
    return None if found is None else Interval(**found)


def versions(commit: str | None = None) -> dict[str, Any]:
    """What a number depends on beside its settings: commit (None outside of a checkout), python and the libraries.

    commit: for a copy without its repository, the commit that it was copied from. It is recorded as stated, not checked, with a digest
    of the package's source (`source_digest`) by which it can be. Raises ValueError where a checkout is there and says another one.
    """
    import torch
    import transformers

    import dllm

    package = Path(dllm.__file__).resolve().parent
    found = _commit(package)
    stated = {}
    if commit is not None and found is None:
        stated = {"commit": f"{commit} (stated)", "source": source_digest(package)}
    elif commit is not None and found != commit:
        raise ValueError(f"commit must be that of the checkout, {found}, or not given: got {commit!r}")
    return {
        "dllm": dllm.__version__,
        "commit": found,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **stated,
    }


def source_digest(package: Path) -> str:
    """16 hex digits over the paths and contents of all Python files of a package folder, links followed."""
    digest = hashlib.sha256()
    # Path.rglob does not enter links, which four of the package's folders are in a checkout.
    files = [Path(where, name) for where, _, names in os.walk(package, followlinks=True) for name in names]
    for path in sorted(path for path in files if path.suffix == ".py"):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


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


def checked_scores(task: Task, sample: Sample, output: str, execute: Callable[..., Any] | None) -> dict[str, float]:
    """The task's scores of one output; raises ValueError for one that is not finite."""
    scores = {name: float(value) for name, value in task.score(sample, output, execute).items()}
    bad = [name for name, value in scores.items() if not math.isfinite(value)]
    if bad:
        raise ValueError(f"scores must be finite: task {task.name}, sample {sample.id}, {bad[0]} is {scores[bad[0]]}")
    return scores


def _record(task: Task, sample: Sample, system: System, answer: Answer, seed: int, extras: Extras) -> dict[str, Any]:
    """All of a sample that does not depend on the clock."""
    scores = {} if extras.deferred else checked_scores(task, sample, answer.text, extras.execute)
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
        "scores": scores,
        "loops": loops(answer.token_ids),
        "accept_lengths": list(answer.cost.accept_lengths),
        "true_length": answer.true_length,
        **{name: getattr(answer.cost, name) for name in COUNTS},
    }
    if sample.question:
        record["question"] = sample.question
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
        white = sample.prefix[len(sample.prefix.rstrip()) :] if answer.white_space_ids is not None else ""
        if other is not None or sample.kind == "infill":
            # The judge reads an infill as the text that it is, however the model was asked; white space that the model wrote is scored.
            text = sample.prefix.removesuffix(white) if sample.kind == "infill" else _plain_text(sample)
            context = tokenizer.encode(text, add_special_tokens=False) if text else [tokenizer.eos_token_id]
        else:
            context = system.context_ids(sample)
        written = [*(answer.white_space_ids or ()), *answer.token_ids]
        if other is not None:
            written = tokenizer.encode(white + answer.text, add_special_tokens=False)
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


def samples_digest(samples: Sequence[Sample]) -> str:
    """What a run's samples are known by."""
    values = [asdict(sample) for sample in samples]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
