"""The whole adaptation on toy bases: it learns, saves, resumes, stops when told, and names what is wrong."""

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dllm.model.adapter import AdapterConfig, fold
from dllm.model.weights import load_state
from dllm.training import adapt as module
from dllm.training.adapt import AdaptConfig, AdaptResult, adapt
from dllm.training.base import load_base
from dllm.training.curves import plot_curves, read_log
from dllm.training.progress import Progress
from dllm.types import DecodeSpec
from tests.training.toy import FILLER, MASK, START, STOP, toy_base, toy_corpus


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("toy")
    bases = {family: toy_base(folder / family, family) for family in ("llama", "qwen3")}
    return {**bases, "corpus": toy_corpus(folder / "corpus.jsonl"), "folder": folder}


def config_for(toy: dict[str, Path], out: Path, family: str = "llama", **changes) -> AdaptConfig:
    given = dict(
        out=out,
        data=(toy["corpus"],),
        base=str(toy[family]),
        rank=8,
        block_length=4,
        mask_token_id=MASK,
        filler_token_id=FILLER,
        start_token_id=START,
        steps=60,
        batch=2,
        rows=384,
        learning_rate=2e-2,
        norm_learning_rate=2e-2,
        warmup=5,
        held_out=20,
        eval_batches=1,
        workers=0,
        device="cpu",
    )
    return AdaptConfig(**{**given, **changes})


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("attention", ["block_causal", "bidirectional"])
def test_a_toy_base_learns_to_fill_its_masks(toy, tmp_path: Path, family: str, attention: str) -> None:
    out = tmp_path / "adapter"
    result = adapt(config_for(toy, out, family, attention=attention))
    assert result.steps == 60
    measured = [line["held_out"] for line in read_log(out / "log.jsonl") if "held_out" in line]
    for kind in ("generation", "infill"):
        # Nearly uniform over 44 tokens at first (3.78 nats).
        assert measured[0][kind]["cross_entropy"] > 3.5
        assert measured[-1][kind]["cross_entropy"] < measured[0][kind]["cross_entropy"] - 0.5
        assert measured[-1][kind] == result.held_out[kind]
    assert sorted(p.name for p in out.iterdir()) == [
        "adapter.safetensors",
        "adapter_config.json",
        "curves.png",
        "log.jsonl",
    ]


def test_the_saved_adapter_folds_into_its_base_and_says_how_to_decode(toy, tmp_path: Path) -> None:
    adapt(config_for(toy, tmp_path / "a", steps=3))
    saved = AdapterConfig.load(tmp_path / "a")
    spec = DecodeSpec(**saved.spec)
    assert (spec.mask_token_id, spec.filler_token_id, spec.logits_shift) == (MASK, FILLER, 1)
    assert (spec.attention, spec.block_length, spec.block_origin, spec.infill) == ("block_causal", 4, "prompt", "rank")
    assert tuple(spec.eos_token_ids) == (STOP,) and spec.vocab_size == 44 and spec.max_positions == 256
    assert saved.training["steps"] == 3 and saved.training["config"]["data"] == ["corpus.jsonl"]
    base = load_base(str(toy["llama"]), "cpu").decoder
    model = fold(base, saved, load_state(tmp_path / "a", "adapter"))
    assert model.embed_tokens.weight is base.embed_tokens.weight
    name = "layers.0.attention.qkv.weight"
    assert not torch.equal(model.state_dict()[name], base.state_dict()[name])
    full = adapt(config_for(toy, tmp_path / "b", steps=1, attention="bidirectional"))
    spec = DecodeSpec(**AdapterConfig.load(full.folder).spec)
    assert (spec.attention, spec.infill, spec.default_cache) == ("bidirectional", "canvas", "none")


def test_training_goes_on_from_a_saved_adapter(toy, tmp_path: Path) -> None:
    first = adapt(config_for(toy, tmp_path / "a", steps=60))
    again = adapt(config_for(toy, tmp_path / "b", steps=1, resume=tmp_path / "a", learning_rate=1e-5))
    start = next(line["held_out"] for line in read_log(tmp_path / "b" / "log.jsonl") if "held_out" in line)
    for kind, value in first.held_out.items():
        # Saved in bf16: three digits.
        assert start[kind]["cross_entropy"] == pytest.approx(value["cross_entropy"], abs=0.05)
    assert again.steps == 1
    with pytest.raises(ValueError, match="adapter tensors do not fit"):
        adapt(config_for(toy, tmp_path / "c", steps=1, resume=tmp_path / "a", family="qwen3"))


def test_sigterm_ends_the_run_and_saves(toy, tmp_path: Path) -> None:
    seen: list[AdaptResult] = []
    told = []

    def tell_the_group() -> None:
        # The first measurement is in the log: the run has begun.
        while not (tmp_path / "a" / "log.jsonl").is_file():
            time.sleep(0.05)
        for child in multiprocessing.active_children():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGTERM)
            told.append(child.pid)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell_the_group, daemon=True).start()
    seen.append(adapt(config_for(toy, tmp_path / "a", steps=None, minutes=5.0, workers=1)))
    assert told
    assert seen[0].seconds < 60
    assert AdapterConfig.load(tmp_path / "a").training["steps"] == seen[0].steps
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_answers_of_the_base_are_mixed_in(toy, tmp_path: Path, monkeypatch) -> None:
    drawn: dict[str, list[tuple[int, float]]] = {}

    class Spy(module.PackedBatches):
        def __init__(self, sources, *rest, **named) -> None:
            drawn.setdefault("shares", [(len(documents), share) for documents, share in sources])
            super().__init__(sources, *rest, **named)

    monkeypatch.setattr(module, "PackedBatches", Spy)
    more = toy_corpus(tmp_path / "more.jsonl", 40)
    adapt(config_for(toy, tmp_path / "a", steps=1, answers=(more,), answer_share=0.25))
    (count, share), (added, added_share) = drawn["shares"]
    assert (share, added_share) == (0.75, 0.25) and added == 40 and count > 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"minutes": 1.0}, "exactly one of steps and minutes must be given: got 60 and 1.0"),
        ({"steps": 0}, "steps must be >= 1"),
        ({"data": ()}, "data must name at least one file"),
        ({"rank": 0}, "rank must be >= 1: got 0"),
        ({"attention": "causal"}, "attention must be one of block_causal, bidirectional: got 'causal'"),
        ({"mask_token_id": None}, "mask_token_id must be given for the base"),
        ({"filler_token_id": MASK}, "filler_token_id must differ from mask_token_id"),
        ({"mask_token_id": 99}, r"mask_token_id must be in \[0, 44\): got 99"),
        ({"base": "./nowhere"}, "no such folder: './nowhere'"),
        ({"held_out": 5000}, "count must be in"),
    ],
)
def test_bad_arguments_are_named_and_leave_no_files(toy, tmp_path: Path, change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        adapt(config_for(toy, tmp_path / "a", **change))
    assert not (tmp_path / "a").exists()


def test_a_base_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "unheard", "architectures": ["X"]}), encoding="utf-8"
    )
    with pytest.raises(ValueError, match="no family reads model_type 'unheard'"):
        load_base(str(tmp_path), "cpu")


def test_the_learning_rate_warms_up_and_falls_on_a_cosine(toy, tmp_path: Path) -> None:
    adapt(config_for(toy, tmp_path / "a", steps=120, warmup=30, learning_rate=1e-3))
    rates = [(x["step"], x["learning_rate"]) for x in read_log(tmp_path / "a" / "log.jsonl") if "learning_rate" in x]
    # Half of the cosine is over near step 60; a step's rate is taken before it.
    by_step = dict(rates)
    assert by_step[50] == pytest.approx(
        1e-3 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * 49 / 120)).item()), rel=1e-4
    )
    assert by_step[120] < 1e-5


def test_the_clock_says_when_a_run_is_over() -> None:
    by_steps, by_time = Progress(10, None), Progress(None, 1e-6)
    assert by_steps.share(5) == 0.5 and not by_steps.done(9) and by_steps.done(10)
    assert by_time.done(0)
    with pytest.raises(ValueError, match="exactly one of steps and limit_s"):
        Progress(None, None)


def test_curves_are_a_png_with_both_panels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = tmp_path / "log.jsonl"
    value = {"slots": 10, "cross_entropy": 2.0, "accuracy": 0.5, "sure": 0.1}
    lines = [{"step": 0, "seconds": 0, "held_out": {"generation": value, "infill": value}}]
    lines += [{"step": 50, "seconds": 5, "loss": 2.5, "accuracy": 0.4}]
    log.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert plot_curves(log, tmp_path / "curves.png")
    data = (tmp_path / "curves.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
    # One more kind is one more line: the picture is made of the log.
    log.write_text("\n".join(map(json.dumps, [*lines, {**lines[0], "step": 50, "held_out": {"boundary": value}}])))
    assert plot_curves(log, tmp_path / "more.png")
    assert (tmp_path / "more.png").read_bytes() != data
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "log.jsonl", "more.png"]


def test_saved_configurations_hold_no_folders_of_this_machine(toy, tmp_path: Path) -> None:
    adapt(replace(config_for(toy, tmp_path / "a"), steps=1))
    saved = json.loads((tmp_path / "a" / "adapter_config.json").read_text(encoding="utf-8"))
    assert str(tmp_path) not in json.dumps(saved["training"])
