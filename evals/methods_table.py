"""The table of docs/methods.md: what each method promises, for which attention, and at what cost, as the code has it.

Dataset, split: none; random decoders with the shipped models' conventions. Prompt: random ids. Metric: whether a method's greedy text is
that of its reference, which combinations raise and why, and rows and forwards as ``Stats`` counts them. Source: the notes of each method
in its own file. ``python -m dllm.evals.methods_table`` writes docs/methods.md; a test fails if the file is not current.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dllm.cache.free import POLICIES
from dllm.guide import ARGuide
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.pipeline import DiffusionLM
from dllm.registry import CACHES, resolve_cache
from dllm.samplers.free_dave import FreeDave
from dllm.samplers.guided import Guided
from dllm.samplers.s2d2 import S2D2
from dllm.samplers.simsd import SimSD
from dllm.types import Attend, DecodeSpec

PATH = Path(__file__).resolve().parent.parent / "docs" / "methods.md"
ATTENTIONS = ("block_causal", "bidirectional")
NEW_TOKENS, BLOCK, PROMPTS = 16, 8, (6, 11)


@dataclass(frozen=True)
class Method:
    """make: keyword arguments of ``generate`` from the diffusion model and a causal one; promise: what the text is; cost: of a step."""

    name: str
    make: Callable[[DiffusionLM, Any], dict[str, Any]]
    promise: str
    cost: str


def _guided(**rule: Any) -> Callable[[DiffusionLM, Any], dict[str, Any]]:
    return lambda lm, causal: {"guide": ARGuide(causal, rule=Guided(**rule))}


METHODS = (
    Method("plain sampler", lambda lm, causal: {}, "the reference", "1 forward"),
    Method(
        "guide, on_reject dlm",
        _guided(accept="topk"),
        "approximate: the diffusion model's tokens in an order that the guide paces; no law is kept",
        "1 forward, 1 guide forward of the committed and drafted tokens",
    ),
    Method(
        "guide, on_reject ar, exact",
        _guided(accept="exact", on_reject="ar"),
        "exact: the guide's own greedy text (temperature > 0: its draw)",
        "1 forward, 1 guide forward",
    ),
    Method(
        "FreeDave, exact",
        lambda lm, causal: {"verifier": FreeDave(4)},
        "exact: the plain sampler's text with the same cache, greedy",
        "1 forward of K - 1 branches more: S rows each (bidirectional: all planned rows)",
    ),
    Method(
        "FreeDave, subset",
        lambda lm, causal: {"verifier": FreeDave(4, rule="subset")},
        "approximate: goes on from states with fewer tokens",
        "as above",
    ),
    Method(
        "S2D2, always",
        lambda lm, causal: {"verifier": S2D2(-float("inf"))},
        "exact for the model's left-to-right view of a block, which is not the denoiser's law; routed: a mixture",
        "1 forward, and where it verifies 1 more of 2 n rows (shifted: n)",
    ),
    Method(
        "SimSD, paper's layout",
        lambda lm, causal: {"verifier": SimSD(1)},
        "approximate: the token that is judged leaks from two layers on",
        "1 forward of 2 n + r rows more (shifted: 3 n + r), and the drafter's forwards",
    ),
    Method(
        "SimSD, exact",
        lambda lm, causal: {"verifier": SimSD(1, exact=True)},
        "exact for the left-to-right view, as S2D2, whatever drafts",
        "1 forward of 2 n + r rows more (shifted: n + r), and the drafter's forwards",
    ),
)
REFERENCES = {"FreeDave, exact": "plain sampler", "SimSD, exact": "S2D2, always"}


def random_decoder(seed: int) -> Decoder:
    """Two layers with large weights, so that arg-max margins are wide and what a row sees matters."""
    torch.manual_seed(seed)
    decoder = Decoder(DecoderConfig(64, 32, 48, 2, 4, 2, 8, 128)).eval().requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() > 1:
            scale = 3.6 if "qkv" in name else 2.4 if "layers" in name else 4.8
            parameter.normal_(0, scale / parameter.shape[-1] ** 0.5)
    decoder.embed_tokens.weight.normal_(0, 1)
    return decoder


def random_lm(attention: Any) -> DiffusionLM:
    """The shipped models' conventions: shifted, blocks of 8 from the prompt's end."""
    spec = DecodeSpec(63, (), 1, attention, BLOCK, 128, 64, block_origin="prompt")
    return DiffusionLM(random_decoder(0), spec)


@torch.no_grad()
def greedy_text(causal: Decoder, ids: list[int]) -> list[int]:
    """The causal model's own greedy tokens after ids, the mask token barred, by whole passes."""
    text = list(ids)
    while len(text) < len(ids) + NEW_TOKENS:
        at = torch.arange(len(text))[None]
        logits = causal.head(causal(torch.tensor([text]), at, None, Attend.causal(at))[0, -1])
        text.append(int(logits[:63].argmax()))
    return text[len(ids) :]


@dataclass
class Row:
    """What a combination gave: texts of the prompts, or why it was refused; rows and forwards of the first prompt."""

    texts: list[list[int]] | None
    refusal: str = ""
    forwards: int = 0
    helpers: int = 0
    rows: int = 0


def attempt(lm: DiffusionLM, causal: Decoder, method: Method, cache: Any, whole: bool) -> Row:
    """Generate with a method and a cache; a refusal is an answer. whole: all prompts and tokens, else a few, to see that it runs."""
    texts, first = [], None
    for length in PROMPTS if whole else PROMPTS[:1]:
        ids = torch.randint(0, 60, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        options = {"max_new_tokens": NEW_TOKENS if whole else 3, "cache": cache, **method.make(lm, causal)}
        if "guide" not in options:
            options["threshold"] = 0.9
        try:
            out = lm.generate(input_ids=[ids], **options)
        except ValueError as error:
            return Row(None, str(error))
        first = out.stats if first is None else first
        texts.append(out.sequences[0].tolist())
    assert first is not None
    return Row(texts, "", first.nfe, first.guide_nfe + first.draft_nfe, first.positions)


def caches() -> dict[str, Any]:
    """Every registered cache at its defaults, and FreeCache's policies."""
    found = {name: resolve_cache(name, {}) for name in CACHES}
    found["free, freeze_delay 1"] = resolve_cache("free", {"freeze_delay": 1})
    for policy in POLICIES:
        if policy != "active":
            found[f"free, {policy}"] = resolve_cache("free", {"policy": policy, "freeze_block": 4, "freeze_window": 6})
    return found


def build() -> str:
    """The text of docs/methods.md."""
    causal = random_decoder(1)
    lms = {attention: random_lm(attention) for attention in ATTENTIONS}
    grid = {
        (attention, name, method.name): attempt(
            lms[attention], causal, method, cache, name == "none" or method.name == "plain sampler"
        )
        for attention in ATTENTIONS
        for name, cache in caches().items()
        for method in METHODS
    }
    return "\n".join([_head(), _methods(grid, causal), _caches(grid), _matrix(grid), _reasons(grid)]) + "\n"


def _head() -> str:
    return (
        "# Methods, and what goes with what\n\n"
        "Written by `python -m dllm.evals.methods_table` from the code: every cell below is a run on small random decoders\n"
        f"(shifted, blocks of {BLOCK}, {NEW_TOKENS} new tokens, greedy, threshold 0.9), none is typed in. A random model shows where a\n"
        "method differs, not how often: rows and forwards are those of one prompt. Quality and speed of real models: docs/log.md.\n"
    )


def _methods(grid: dict[tuple[str, str, str], Row], causal: Decoder) -> str:
    lines = [
        "## Guides and verifiers\n",
        "`found` compares the greedy text with the promise's own reference: the causal model's whole passes (guide), the plain sampler\n"
        "(FreeDave), S2D2's view (SimSD exact). Forwards: main + helpers, and rows of the main model, without a cache.\n",
        "| method | promise | cost of a step | block_causal: found, forwards, rows | bidirectional |",
        "|---|---|---|---|---|",
    ]
    own = [
        greedy_text(causal, torch.randint(0, 60, (n,), generator=torch.Generator().manual_seed(n)).tolist())
        for n in PROMPTS
    ]
    for method in METHODS:
        cells = []
        for attention in ATTENTIONS:
            row = grid[attention, "none", method.name]
            if row.texts is None:
                cells.append("refused")
                continue
            wanted = own if method.name == "guide, on_reject ar, exact" else None
            if method.name in REFERENCES:
                wanted = grid[attention, "none", REFERENCES[method.name]].texts
            same = "" if wanted is None else "same text, " if wanted == row.texts else "other text, "
            cells.append(f"{same}{row.forwards} + {row.helpers}, {row.rows}")
        lines.append(f"| {method.name} | {method.promise} | {method.cost} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def _caches(grid: dict[tuple[str, str, str], Row]) -> str:
    lines = [
        "## Caches\n",
        "Against `none`, with the plain sampler: the same greedy text or another one, forwards, rows of the main model.\n",
        "| cache | block_causal | bidirectional |",
        "|---|---|---|",
    ]
    for name in caches():
        cells = []
        for attention in ATTENTIONS:
            row, plain = grid[attention, name, "plain sampler"], grid[attention, "none", "plain sampler"]
            if row.texts is None:
                cells.append("refused")
                continue
            same = "same text" if row.texts == plain.texts else "other text"
            cells.append(f"{same}, {row.forwards}, {row.rows}")
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def _matrix(grid: dict[tuple[str, str, str], Row]) -> str:
    short = [method.name for method in METHODS if method.name != "plain sampler"]
    lines = [
        "## Combinations\n",
        "B: with a block-causal model, D: with a bidirectional one, BD: with both, -: refused (below: why). A method that is exact is so\n"
        "relative to the same cached decoder; the guide's own text and the left-to-right view do not depend on an exact cache.\n",
        "| cache | " + " | ".join(short) + " |",
        "|---" * (len(short) + 1) + "|",
    ]
    for name in caches():
        cells = []
        for method in short:
            works = "".join(
                letter
                for letter, attention in zip("BD", ATTENTIONS, strict=True)
                if grid[attention, name, method].texts is not None
            )
            cells.append(works or "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _reasons(grid: dict[tuple[str, str, str], Row]) -> str:
    reasons = sorted({row.refusal for row in grid.values() if row.refusal})
    lines = ["## Why combinations are refused\n"]
    return "\n".join(lines + [f"- {reason}" for reason in reasons])


if __name__ == "__main__":
    PATH.write_text(build(), encoding="utf-8")
    print(f"{PATH}: written")
