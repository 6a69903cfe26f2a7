"""Command line: `dllm generate | infill | chat | demo | bench | adapt | train-drafter | export` and more.

Each command is a thin face of the Python API.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dllm import __version__
from dllm.commands_eval import register as register_eval_commands
from dllm.registry import CACHES, SAMPLERS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Diffusion language models made fast: generate, fill gaps, chat, and adapt your own from an AR checkpoint.",
)

DEFAULT_MODEL = "smollm2-135m-bd8"

Model = Annotated[str, typer.Option("--model", "-m", help="A shipped name, a folder or a hub id.")]
Sampler = Annotated[str | None, typer.Option(help=f"One of {', '.join(SAMPLERS)} (default: the model's own).")]
ThresholdOption = Annotated[
    float | None,
    typer.Option(help="Commit every token at least this sure (sampler threshold); above 1: one token a step."),
]
CacheOption = Annotated[str, typer.Option(help=f"auto (the model's own), {', '.join(CACHES)}.")]
BlockLength = Annotated[int | None, typer.Option(help="Tokens per block (default: the model's own).")]
Steps = Annotated[int | None, typer.Option("--max-denoising-steps", help="Denoise steps per block.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the noise (only used at temperature > 0).")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
StatsOption = Annotated[bool, typer.Option("--stats/--no-stats", help="Print what it cost, to stderr.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens to generate.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object a row instead of text.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dllm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn the library's errors about input into one line and exit status 2."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        Console(stderr=True).print(Text(f"error: {error}", style="red"))
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _load(model: str, dtype: str, device: str) -> Any:
    from dllm.pipeline import DiffusionLM

    console = Console(stderr=True)
    if not console.is_terminal:
        return DiffusionLM.from_pretrained(model, dtype=dtype, device=device)
    with console.status(f"loading {model}"):
        return DiffusionLM.from_pretrained(model, dtype=dtype, device=device)


def _settings(
    sampler: str | None,
    threshold: float | None,
    cache: str,
    block_length: int | None,
    steps: int | None,
    temperature: float,
    seed: int | None,
) -> dict[str, Any]:
    settings: dict[str, Any] = {"cache": cache, "temperature": temperature, "seed": seed}
    optional = {"sampler": sampler, "threshold": threshold, "block_length": block_length, "max_denoising_steps": steps}
    settings.update({name: value for name, value in optional.items() if value is not None})
    return settings


def _cost(stats: Any) -> str:
    seconds = stats.prefill_s + stats.decode_s
    return (
        f"{stats.useful_tokens} tokens, {stats.nfe} forwards, {stats.tokens_per_forward:.2f} tokens per forward, "
        f"{stats.positions} positions, {seconds:.2f} s, {stats.tokens_per_second:.1f} tokens/s"
    )


@app.command()
def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="One or more prompts; none: read one from standard input.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    max_new_tokens: MaxNewTokens = 256,
    sampler: Sampler = None,
    threshold: ThresholdOption = None,
    cache: CacheOption = "auto",
    block_length: BlockLength = None,
    max_denoising_steps: Steps = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Stop string; may be given several times.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the text as it is.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    stats: StatsOption = True,
    as_json: JsonOption = False,
) -> None:
    """Answer one or more prompts."""
    with _plain_errors():
        prompts = prompt or [_prompt_of_stdin()]
        lm = _load(model, dtype, device)
        output = lm.generate(
            prompts,
            use_chat_template=False if raw else "auto",
            max_new_tokens=max_new_tokens,
            stop_strings=stop or None,
            **_settings(sampler, threshold, cache, block_length, max_denoising_steps, temperature, seed),
        )
    console = Console(soft_wrap=True, highlight=False)
    for i, text in enumerate(output.texts):
        if as_json:
            row = {
                "prompt": prompts[i],
                "text": text,
                "finish_reason": output.finish_reasons[i],
                "stats": output.row_stats[i].as_dict(),
            }
            typer.echo(json.dumps(row))
            continue
        if len(prompts) > 1:
            console.rule(Text(prompts[i][:60]))
        typer.echo(text)
    if stats and not as_json:
        Console(stderr=True).print(Text(_cost(output.stats), style="dim"))


def _prompt_of_stdin() -> str:
    # Python has no stdin where the shell closed it.
    text = "" if sys.stdin is None else sys.stdin.read()
    if not text:
        raise ValueError("prompt must be given, as an argument or on standard input: got none")
    return text


@app.command()
def infill(
    prefix: Annotated[str, typer.Argument(help="Text before the gap; with --template: text with {{name}} marks.")],
    suffix: Annotated[str, typer.Argument(help="Text after the gap.")] = "",
    template: Annotated[bool, typer.Option("--template", help="PREFIX is a template with {{name}} marks.")] = False,
    gap: Annotated[
        list[str] | None, typer.Option("--gap", help="name=TOKENS for a mark of the template (default: auto).")
    ] = None,
    length: Annotated[
        str, typer.Option(help="Tokens of the gap, or auto; the shipped models fill all that auto may take.")
    ] = "auto",
    max_length: Annotated[int, typer.Option(help="Longest gap that auto may choose.")] = 64,
    model: Model = DEFAULT_MODEL,
    sampler: Sampler = None,
    threshold: ThresholdOption = None,
    cache: CacheOption = "auto",
    block_length: BlockLength = None,
    max_denoising_steps: Steps = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    stats: StatsOption = True,
    as_json: JsonOption = False,
) -> None:
    """Fill the gap between two texts, or the gaps of a template; the given text stays as it is."""
    with _plain_errors():
        settings = _settings(sampler, threshold, cache, block_length, max_denoising_steps, temperature, seed)
        if template:
            if suffix:
                raise ValueError("SUFFIX must not be given with --template")
            lengths = [_gap(item) for item in gap or []]
            names = [name for name, _ in lengths]
            if len(set(names)) < len(names):
                raise ValueError(f"--gap must be given once a mark: got {' '.join(gap or [])}")
            where: dict[str, Any] = {"template": prefix, "gaps": dict(lengths)}
        else:
            if gap:
                raise ValueError("--gap goes with --template")
            where = {"prefix": prefix, "suffix": suffix, "length": _tokens(length, "length")}
        fill = _load(model, dtype, device).infill(max_length=max_length, **where, **settings)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "text": fill.texts[0],
                    "fill": fill.fills[0],
                    "lengths": fill.lengths[0],
                    "stats": fill.stats.as_dict(),
                }
            )
        )
        return
    typer.echo(fill.texts[0])
    if stats:
        console = Console(stderr=True)
        console.print(Text(f"gap lengths {fill.lengths[0]}; {_cost(fill.stats)}", style="dim"))
        asked = [where["length"]] if "length" in where else list(where["gaps"].values())
        if max_length in fill.lengths[0] and max_length not in asked:
            console.print(
                Text(f"a gap took all {max_length} tokens: the model never closed it; say how long it is", style="dim")
            )


def _gap(item: str) -> tuple[str, Any]:
    name, _, value = item.partition("=")
    if not name or not value:
        raise ValueError(f"--gap must be name=TOKENS or name=auto: got {item!r}")
    return name, _tokens(value, f"gap {name}")


def _tokens(value: str, what: str) -> int | str:
    if value == "auto":
        return value
    if not (value.isascii() and value.removeprefix("-").isdigit()):
        raise ValueError(f"{what} must be a number of tokens or 'auto': got {value!r}")
    return int(value)


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="System message (default: the template's own).")] = None,
    max_new_tokens: MaxNewTokens = 256,
    sampler: Sampler = None,
    threshold: ThresholdOption = None,
    cache: CacheOption = "auto",
    block_length: BlockLength = None,
    max_denoising_steps: Steps = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    stats: StatsOption = True,
) -> None:
    """Talk to a model and watch the canvas denoise: final tokens in full, the open block's guesses dimmed. /exit or Ctrl-D ends."""
    with _plain_errors():
        lm = _load(model, dtype, device)
        settings = _settings(sampler, threshold, cache, block_length, max_denoising_steps, temperature, seed)
        console = Console()
        messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        while True:
            try:
                question = console.input("[bold]you>[/] ").strip()
            except EOFError:
                break
            if question in ("/exit", "/quit"):
                break
            if not question:
                continue
            messages.append({"role": "user", "content": question})
            events = lm.stream(messages=messages, max_new_tokens=max_new_tokens, provisional=True, **settings)
            answer, steps = show_live(console, events)
            if stats:
                tokens = len(lm.tokenizer.encode(answer, add_special_tokens=False))
                console.print(Text(f"{tokens} tokens in {steps} denoise steps", style="dim"))
            messages.append({"role": "assistant", "content": answer})


def show_live(console: Console, events: Any) -> tuple[str, int]:
    """Print a stream of events as it denoises; returns the final text of row 0 and the number of denoise steps."""
    final, steps = "", 0
    with Live(console=console, refresh_per_second=20, vertical_overflow="visible") as live:
        for event in events:
            steps = event.step
            if event.kind == "committed":
                final += event.text
            guess = event.text if event.kind == "provisional" else ""
            live.update(Text(final) + Text(guess, style="dim"))
    if not console.is_terminal:
        # There the display does not end its last line.
        console.print()
    return final, steps


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the replay page goes.")] = Path("dllm-demo.html"),
    max_new_tokens: MaxNewTokens = 32,
) -> None:
    """Three answers and two filled gaps on the shipped models, a cost table, and a page that replays the denoising."""
    with _plain_errors():
        from dllm.evals.demo import run_demo

        run_demo(out, max_new_tokens, Console())


_DELEGATED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Commands defined beside their heavy modules, which are loaded only when the command is asked for."""


@app.command(context_settings=_DELEGATED, help="Adapt a Llama- or Qwen-type AR checkpoint into a diffusion LM.")
def adapt(context: typer.Context) -> None:
    from dllm.training.adapt import command

    _delegate(command, "dllm adapt", context.args)


@app.command("train-drafter", context_settings=_DELEGATED, help="Train a DFlash or DFly drafter for an AR model.")
def train_drafter(context: typer.Context) -> None:
    from dllm.training.draft import command

    _delegate(command, "dllm train-drafter", context.args)


@app.command(
    "train-block-pilot", context_settings=_DELEGATED, help="Train a policy that predicts a request's block length."
)
def train_block_pilot(context: typer.Context) -> None:
    from dllm.training.block_pilot_command import command

    _delegate(command, "dllm train-block-pilot", context.args)


@app.command(
    context_settings=_DELEGATED, help="Write a drafter as the folder that vLLM or SGLang loads, with its launch line."
)
def export(context: typer.Context) -> None:
    from dllm.bridge.engines import command

    _delegate(command, "dllm export", context.args)


@app.command(context_settings=_DELEGATED, help="Time kernels, steps and decoding beside their baselines.")
def bench(context: typer.Context) -> None:
    from dllm.evals.bench.run import main

    with _plain_errors():
        if _bench_device(context.args) == "cpu":
            Console(stderr=True).print(
                "note: on a CPU these times mean nothing; this is a benchmark of GPUs", style="dim"
            )
        raise typer.Exit(main(context.args))


def _bench_device(arguments: list[str]) -> str:
    """The device that ``dllm bench`` takes, "help" where it only prints its help."""
    import torch

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-h", "--help", dest="device", action="store_const", const="help")
    return str(parser.parse_known_args(arguments)[0].device)


def _delegate(command: Callable[..., Any], name: str, arguments: list[str]) -> None:
    other = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    other.command()(command)
    with _plain_errors():
        other(arguments, prog_name=name)


register_eval_commands(app)

if __name__ == "__main__":
    app()
