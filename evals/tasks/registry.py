"""The tasks by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from dllm.evals.task import Task
from dllm.evals.tasks.aesop_infill import AesopInfill
from dllm.evals.tasks.chat_heldout import ChatHeldout
from dllm.evals.tasks.files_infill import FilesInfill
from dllm.evals.tasks.gsm8k import GSM8K
from dllm.evals.tasks.humaneval import HumanEval
from dllm.evals.tasks.humaneval_infilling import SPLITS, HumanEvalInfilling
from dllm.evals.tasks.math500 import Math500
from dllm.evals.tasks.mbpp import MBPP
from dllm.evals.tasks.mtbench import MTBench
from dllm.evals.tasks.story_infill import StoryInfill

TASKS: dict[str, Callable[..., Task]] = {
    **{f"humaneval_infilling_{split}": partial(HumanEvalInfilling, split) for split in SPLITS},
    "story_infill": StoryInfill,
    "aesop_infill": AesopInfill,
    "files_infill": FilesInfill,
    "gsm8k": GSM8K,
    "math500": Math500,
    "humaneval": HumanEval,
    "mbpp": MBPP,
    "mtbench": MTBench,
    "chat_heldout": ChatHeldout,
}
"""Name -> what makes the task; its keyword arguments are the task's options."""


def get_task(name: str, **options: Any) -> Task:
    """The task of this name with its options, for instance ``get_task("files_infill", unit="line")``.

    Raises ValueError for an unknown name and TypeError for an option that the task does not have, naming what there is.
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}: got {name!r}")
    accepted = [p.name for p in inspect.signature(TASKS[name]).parameters.values()]
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise TypeError(f"task {name} has the options {', '.join(accepted) or 'none'}: got {', '.join(unknown)}")
    return TASKS[name](**options)
