"""A real AR server drafts with our drafters: vLLM with each of them against vLLM without, and against our own loop.

Prompts: 16 questions (chat, maths, code) below, or a JSONL file. Metrics: answers whose tokens are the same as without
drafting (greedy, fp32; all must be); tokens a verify pass commits, from the server's /metrics, against our loop's on the same
prompts with the same weights (within 3 %). Ends with status 1 where one fails. Needs vllm and openai: ``make vllm-check``.

    python -m dllm.evals.vllm_check [--drafter smollm2-135m-dflash] [--count 16] [--max-new-tokens 128] [--out result.json]
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dllm.bridge.engines import export_for_engine
from dllm.drafters.dfly import DFly
from dllm.drafters.drafter import Drafter
from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.divergence import Divergence, divergences
from dllm.evals.vllm_ours import Accepted, is_tie, our_answers
from dllm.evals.vllm_server import Answer, VLLMServer
from dllm.prompts import apply_template
from dllm.target import load_target, stop_ids_of, target_folder

DRAFTERS = ("smollm2-135m-dflash", "smollm2-135m-dfly")
TOLERANCE = 0.03
"""Largest difference of the accepted lengths, as a share of ours."""
QUESTIONS = (
    "What makes bread rise?",
    "A shop sells pens at 3 dollars each. How much do 7 pens cost, and what is the change from 50 dollars?",
    "Write a Python function that returns the largest number in a list.",
    "Give me three tips for sleeping better.",
    "Explain what a rainbow is to a child.",
    "If a train travels 60 miles in 45 minutes, how far does it travel in 3 hours?",
    "Write a short poem about the sea in winter.",
    "Write a Python function that counts the vowels in a string.",
    "Why is the sky dark at night?",
    "Write a polite email asking to move a meeting from Monday to Tuesday.",
    "Tom has 12 apples. He gives a third of them to Ann and eats two. How many are left?",
    "What is the difference between weather and climate?",
    "Write a Python program that prints the first ten square numbers.",
    "Suggest a simple dinner with rice and eggs.",
    "List the planets of the solar system, nearest to the sun first.",
    "What should I look at when I buy a used bicycle?",
)


@dataclass(frozen=True)
class DrafterResult:
    """One drafter in the server. same: answers equal to the server's without drafting; ties: differences at a near-tie;
    same_as_ours: answers equal to our loop's; server, ours: drafting, counted the same way.
    """

    drafter: str
    prompts: int
    same: int
    ties: int
    same_as_ours: int
    server: Accepted
    ours: Accepted

    @property
    def gap(self) -> float:
        """Server's accepted length over ours, less one."""
        return self.server.length / self.ours.length - 1

    @property
    def ok(self) -> bool:
        return self.same + self.ties == self.prompts and abs(self.gap) <= TOLERANCE and self.server.passes > 0


def compare(
    name: str,
    target: Any,
    plain: Sequence[Answer],
    drafted: Sequence[Answer],
    server: Accepted,
    ours: Sequence[tuple[list[int], Accepted]],
) -> tuple[DrafterResult, list[Divergence]]:
    """Judge one drafter's answers; the second part says where answers differ from the server's own without drafting."""
    own = [answer.ids for answer in plain]
    differences = divergences(target, [a.prompt_ids for a in plain], own, [answer.ids for answer in drafted])
    result = DrafterResult(
        drafter=name,
        prompts=len(plain),
        same=len(plain) - len(differences),
        ties=sum(map(is_tie, differences)),
        same_as_ours=sum(b.ids == answer for b, (answer, _) in zip(drafted, ours, strict=True)),
        server=server,
        ours=sum((accepted for _, accepted in ours), Accepted(0, 0)),
    )
    return result, differences


def result_table(results: Sequence[DrafterResult]) -> Table:
    """One row a drafter."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, caption="accepted: tokens a verify pass, the target's own included"
    )
    headings = (
        "drafter",
        "same tokens",
        "near-ties",
        "as our loop",
        "accepted, vLLM",
        "accepted, ours",
        "gap",
        "passes",
        "",
    )
    for heading in headings:
        table.add_column(heading)
    for r in results:
        table.add_row(
            r.drafter,
            f"{r.same}/{r.prompts}",
            str(r.ties),
            f"{r.same_as_ours}/{r.prompts}",
            f"{r.server.length:.3f}",
            f"{r.ours.length:.3f}",
            f"{r.gap:+.1%}",
            f"{r.server.passes} / {r.ours.passes}",
            "ok" if r.ok else "MISS",
        )
    return table


def command(
    drafter: Annotated[
        list[str] | None, typer.Option(help="Shipped name or folder; may be given several times.")
    ] = None,
    target: Annotated[str, typer.Option(help="Shipped name or folder of the AR model.")] = "smollm2-135m",
    prompts: Annotated[Path | None, typer.Option(help="JSONL of questions (default: 16 of our own).")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts to ask.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128,
    num_drafts: Annotated[int, typer.Option(min=1, help="Drafts of a pass.")] = 7,
    together: Annotated[int, typer.Option(min=1, help="Requests that the server decodes together.")] = 4,
    ready_s: Annotated[float, typer.Option(help="Seconds that a server may take to start.")] = 600.0,
    logs: Annotated[Path | None, typer.Option(help="Folder for the servers' logs (default: a temporary one).")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Start vLLM with and without our drafters and compare."""
    # Ended from outside, it still has to end the server.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    names = list(drafter or DRAFTERS)
    console = Console(width=150)
    work = Path(tempfile.mkdtemp(prefix="dllm-vllm-"))
    logs = logs or work
    logs.mkdir(parents=True, exist_ok=True)
    model = load_target(target, dtype="float32", device="cpu")
    questions = _questions(prompts, count)
    ids = [apply_template(model.tokenizer, said) for said in questions]
    width = max(map(len, ids)) + max_new_tokens + num_drafts + 1
    settings: dict[str, Any] = {"max_model_len": -(-width // 128) * 128, "max_num_seqs": together, "ready_s": ready_s}
    folder = target_folder(target)

    console.print(f"vLLM without drafting: {len(ids)} prompts, at most {max_new_tokens} tokens")
    with VLLMServer(folder, logs / "plain.log", **settings) as server:
        plain = server.ask(questions, max_new_tokens)
    wrong = [i for i, answer in enumerate(plain) if answer.prompt_ids != ids[i]]
    if wrong:
        raise ValueError(f"the server must read the prompts as our template writes them: prompt {wrong[0]} differs")

    results = []
    for name in names:
        loaded = Drafter.from_pretrained(name, model, dtype=torch.float32, device="cpu")
        if isinstance(loaded, DFly):
            loaded.head_candidates = None  # vLLM decides a slot on the whole vocabulary
        label = Path(name).name
        start = export_for_engine(
            loaded, work / label, "vllm", target=folder, num_drafts=num_drafts, dtype=torch.float32
        )
        speculative = json.loads(start.command[start.command.index("--speculative-config") + 1])
        console.print(f"vLLM with {label}, then our loop")
        with VLLMServer(folder, logs / f"{label}.log", speculative, **settings) as server:
            drafted = server.ask(questions, max_new_tokens)
            counted = server.accepted()
        ours = our_answers(model, loaded, ids, num_drafts, max_new_tokens, stop_ids_of(model), together)
        result, differences = compare(label, model, plain, drafted, counted, ours)
        results.append(result)
        for difference in differences:
            console.print(
                f"  {label}: an answer differs at token {difference.place}, gap of the logits {difference.gap}"
            )
        if out is not None:
            lines = [{**asdict(r), "gap": r.gap, "ok": r.ok} for r in results]
            write_text_atomic(
                out, json.dumps({"settings": {**settings, "num_drafts": num_drafts}, "results": lines}, indent=1)
            )
    console.print(result_table(results))
    if not all(r.ok for r in results):
        console.print(f"logs: {logs}")
        raise typer.Exit(1)


def _questions(path: Path | None, count: int) -> list[list[dict[str, str]]]:
    said = list(QUESTIONS) if path is None else [_said(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if len(said) < count:
        raise ValueError(f"count must be at most {len(said)}, the number of prompts: got {count}")
    return [[{"role": "user", "content": text}] for text in said[:count]]


def _said(line: str) -> str:
    """The user's words in a line of a prompt file."""
    read = json.loads(line)
    turns = read.get("turns")
    said = read.get("question") or read.get("prompt") or read.get("text") or (turns[0] if turns else None)
    if not said:
        raise ValueError(f"prompts must have question, prompt, text or turns: got {sorted(read)}")
    return str(said)


if __name__ == "__main__":
    typer.run(command)
