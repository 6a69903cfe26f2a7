"""Names of the models that ship with the package: of which kind each is, what opens it, and where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Kind = Literal["diffusion", "drafter", "ar"]

ASSETS = Path(__file__).parent / "assets"
SHIPPED_TARGETS = ("smollm2-135m",)
"""AR models, installed as packages of their own."""

_PLURAL: dict[Kind, str] = {"diffusion": "models", "drafter": "drafters", "ar": "AR models"}
_WHAT: dict[Kind, str] = {"diffusion": "a diffusion LM", "drafter": "a drafter", "ar": "an AR model"}
_OPENED_BY: dict[Kind, str] = {
    "diffusion": "DiffusionLM.from_pretrained({name!r})",
    "drafter": "Drafter.from_pretrained({name!r}, target=...)",
    "ar": "load_target({name!r})",
}


def shipped_names(kind: Kind) -> list[str]:
    """Names of one kind; adapters and drafters are found in the package's own folder."""
    if kind == "ar":
        return list(SHIPPED_TARGETS)
    mark = {"diffusion": "adapter_config.json", "drafter": "config.json"}[kind]
    return sorted(p.name for p in ASSETS.iterdir() if (p / mark).is_file()) if ASSETS.is_dir() else []


def is_shipped(name: str | Path, kind: Kind) -> bool:
    """Whether a name means a shipped model of this kind; a folder of that name goes before it.

    Raises ValueError for a shipped name of another kind, saying what it is and what opens it.
    """
    text = str(name)
    if Path(name).is_dir():
        return False
    if text in shipped_names(kind):
        return True
    for other in _WHAT:
        if text in shipped_names(other):
            opened = _OPENED_BY[other].format(name=text)
            raise ValueError(f"name must be that of {_WHAT[kind]}: {text!r} is {_WHAT[other]}, which {opened} opens")
    return False


@contextmanager
def listing_shipped(kind: Kind) -> Iterator[None]:
    """Add the shipped names of a kind to the error of a search that finds nothing."""
    try:
        yield
    except FileNotFoundError as error:
        names = ", ".join(shipped_names(kind)) or "none"
        raise type(error)(f"{error}\nshipped {_PLURAL[kind]}: {names}") from error
