"""What the files of a saved run must hold, so that a damaged one is named before anybody works with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUMBER = (int, float)
MAYBE = (int, float, type(None))
Fields = Mapping[str, type | tuple[type, ...]]
"""Name -> type, or types, of the values that JSON gives."""

TASK: Fields = {"name": str, "metric": (str, type(None)), "dataset": (str, type(None)), "split": (str, type(None))}
RUN_FIELDS: Fields = {"num_samples": int, "task": dict, "settings": dict, "versions": dict}
LINE_FIELDS: Mapping[str, Fields] = {
    "record": {
        "id": str,
        "given": dict,
        "reference": str,
        "output": str,
        "token_ids": list,
        "finish_reason": str,
        "scores": dict,
        "loops": bool,
        "accept_lengths": list,
        "nfe": int,
        "guide_nfe": int,
        "draft_nfe": int,
        "useful_tokens": int,
        "positions": int,
        "log_likelihood": MAYBE,
        "scored_tokens": int,
    },
    "time": {"seconds": NUMBER, "prefill_s": NUMBER, "decode_s": NUMBER, "batch_rows": int},
}
"""Of each sample its record and its times; see ``dllm.evals.runner``."""
REPLAY: Fields = {"prompt": str, "before": str, "after": str, "length": int, "nfe": int, "texts": dict, "steps": list}
STEP: Fields = dict.fromkeys(("token_ids", "masked", "new", "provisional_ids"), list) | {"step": int, "nfe": int}


def checked(value: Any, fields: Fields, where: object) -> dict[str, Any]:
    """The value if it is an object that has these fields, of these types; else ValueError says what is wrong ``where``."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be a JSON object: got {str(value)[:60]!r}")
    for name, kinds in fields.items():
        if name not in value:
            raise ValueError(f"{where}: must have {name!r}: got {sorted(value)}")
        found = value[name]
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ValueError(f"{where}: {name!r} must be {names}: got {str(found)[:60]!r}")
    return value


def read_json(path: Path) -> Any:
    """The JSON value of a file. Raises ValueError naming the file where it is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path}: must be there, as the run's other files are") from error
    except ValueError as error:
        raise ValueError(f"{path}: must be JSON: {error}") from error


def read_run(path: Path) -> dict[str, Any]:
    """run.json of a run that ``dllm eval`` wrote."""
    run = checked(read_json(path), RUN_FIELDS, path)
    checked(run["task"], TASK, f"{path}, task")
    return run


def read_replays(path: Path) -> list[dict[str, Any]]:
    """replays.json, or none where it is not there."""
    if not path.is_file():
        return []
    found = read_json(path)
    if not isinstance(found, list):
        raise ValueError(f"{path}: must be a JSON list: got {str(found)[:60]!r}")
    for i, replay in enumerate(found):
        for step in checked(replay, REPLAY, f"{path}, replay {i}")["steps"]:
            checked(step, STEP, f"{path}, replay {i}, a step")
    return found
