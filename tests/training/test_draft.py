"""The whole training of drafters on toy targets: it learns, measures, saves, resumes, stops when told, and names what is wrong."""

import json
import math
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dllm.drafters.drafter import Context, Drafter
from dllm.training import draft as module
from dllm.training.base import load_base, load_tokenizer
from dllm.training.curves import read_log
from dllm.training.data import Documents, load_documents
from dllm.training.draft import DraftTrainConfig, train_drafter
from dllm.training.draft_config import drafter_config
from dllm.training.draft_curves import plot_draft_curves
from dllm.training.draft_loss import DraftLoss
from dllm.training.draft_trainer import DraftResult, tap_scales
from tests.training.toy import MASK, toy_base


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("toy")
    corpus = varied_corpus(folder / "corpus.jsonl")
    bases = {family: taught(toy_base(folder / family, family), corpus) for family in ("llama", "qwen3")}
    return {**bases, "corpus": corpus, "folder": folder}


def varied_corpus(path: Path, count: int = 120) -> Path:
    """Answers without loops whose tokens follow from the question's letter."""
    lines = []
    for i in range(count):
        at = i * 7 % 26
        letters = "".join(chr(97 + (at + 3 * k) % 26) for k in range(22))
        lines.append(json.dumps({"prompt": f"say {letters[0]}", "answer": f"{letters[:11]} {i % 10} {letters[11:]}."}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def taught(folder: Path, corpus: Path, steps: int = 80) -> Path:
    """Teach the random base its corpus a little: a target whose next token cannot be guessed teaches a drafter nothing."""
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    documents = load_documents(corpus, load_tokenizer(str(folder)))
    count = min(len(documents[i][0]) for i in range(len(documents)))
    ids = torch.tensor(np.stack([documents[i][0][:count] for i in range(len(documents))]).astype(np.int64))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = ids[step % 6 :: 6]
        model(input_ids=rows, labels=rows).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(folder)
    return folder


def config_for(toy: dict[str, Path], out: Path, family: str = "llama", **changes) -> DraftTrainConfig:
    given = dict(
        out=out,
        data=(toy["corpus"],),
        target=str(toy[family]),
        kinds=("dfly",),
        num_layers=1,
        target_layer_ids=(0, 1),
        block_length=4,
        mask_token_id=MASK,
        steps=40,
        batch=2,
        length=96,
        anchors=16,
        learning_rate=1e-2,
        warmup=5,
        held_out=20,
        eval_prompts=6,
        eval_new_tokens=24,
        workers=0,
        device="cpu",
    )
    return DraftTrainConfig(**{**given, **changes})


def read_losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder / "log.jsonl") if "loss" in line]


def test_both_kinds_learn_side_by_side_and_their_folders_load(toy, tmp_path: Path) -> None:
    results = train_drafter(config_for(toy, tmp_path / "out", kinds=("dflash", "dfly"), steps=120))
    assert [r.kind for r in results] == ["dflash", "dfly"]
    target = load_base(str(toy["llama"]), "cpu").decoder
    for result in results:
        assert result.folder == tmp_path / "out" / result.kind and result.steps == 120
        losses = read_losses(result.folder)
        assert losses[-1] < 0.7 * losses[0]
        assert sorted(p.name for p in result.folder.iterdir()) == [
            "config.json",
            "curves.png",
            "log.jsonl",
            "model.safetensors",
        ]
        drafter = Drafter.from_pretrained(result.folder, target=target)
        saved = json.loads((result.folder / "config.json").read_text(encoding="utf-8"))
        assert drafter.config.layout == ("angelspec" if result.kind == "dfly" else "z-lab")
        assert drafter.config.target_layer_ids == (0, 1) and drafter.config.mask_token_id == MASK
        assert saved["dllm"]["training"]["steps"] == 120 and saved["dllm"]["target"] == "llama"
        assert str(tmp_path) not in json.dumps(saved) and str(toy["folder"]) not in json.dumps(saved)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_acceptance_of_the_targets_own_text_rises(toy, tmp_path: Path, family: str) -> None:
    result = train_drafter(config_for(toy, tmp_path / "a", family, steps=100))[0]
    log = read_log(tmp_path / "a" / "log.jsonl")
    # All 44 tokens are among the 64 candidates of a slot, so that nothing changes.
    assert [x["held_out_candidates"] for x in log if "candidates" in x] == [result.held_out]
    lengths = [x["held_out"]["all"]["accept_length"] for x in log if "held_out" in x]
    assert lengths[-1] == result.held_out["all"]["accept_length"]
    assert 1.0 <= lengths[0] < 1.6 and lengths[-1] > lengths[0] + 0.4


def test_labels_are_the_targets_next_tokens_at_the_slots(toy, tmp_path: Path) -> None:
    """A batch's teacher of slot k is the target's law after the text up to k - 1."""
    config = config_for(toy, tmp_path / "a", loss=DraftLoss(label="law"))
    base = load_base(str(toy["llama"]), "cpu")
    trainer = module.DraftTrainer(config, base, [module._drafter(config, "dfly", base)], None)
    student = trainer.students[0]
    reader = trainer._prepare("sdpa")
    ids = np.random.default_rng(0).integers(5, 40, 60)
    batch = next(iter(module.DraftBatches([(Documents.of([(ids, 10)]), 1.0)], 1, 60, 8, 4, 0)))
    seen: dict[str, torch.Tensor] = {}

    def spy(hidden, teacher, token):
        seen.update(teacher=teacher, token=token)
        return student_head(hidden, teacher, token)

    assert student.head is not None
    student_head, student.head = student.head, spy  # type: ignore[assignment]
    features, states = reader.read(batch)
    student.loss(batch, features, states)
    text = torch.from_numpy(ids)[None]
    positions = torch.arange(60)[None]
    alone = base.decoder(text, positions, None, torch.ones(1, 60, 60, dtype=torch.bool).tril())[0]
    teacher = seen["teacher"].view(8, 3, -1)
    token = seen["token"].view(8, 3)
    for a, anchor in enumerate(batch.anchor[0].tolist()):
        for k in range(1, 4):
            if batch.labelled[0, a, k - 1]:
                torch.testing.assert_close(teacher[a, k - 1], alone[anchor + k - 1], atol=1e-5, rtol=1e-5)
                assert token[a, k - 1] == ids[anchor + k]


def test_training_goes_on_from_saved_weights_with_a_fresh_warm_up(toy, tmp_path: Path) -> None:
    first = train_drafter(config_for(toy, tmp_path / "a", steps=120, warmup=30))[0]
    again = train_drafter(config_for(toy, tmp_path / "b", steps=1, resume=tmp_path / "a"))[0]
    log = read_log(tmp_path / "b" / "log.jsonl")
    start = next(line["held_out"] for line in log if "held_out" in line)
    # Saved in bf16: a draft may differ here and there.
    assert start["all"]["accept_length"] == pytest.approx(first.held_out["all"]["accept_length"], abs=0.15)
    assert read_losses(tmp_path / "b")[0] < 0.8 * read_losses(tmp_path / "a")[0]
    assert [line["learning_rate"] for line in log if "learning_rate" in line] == [0.0] and again.steps == 1
    rates = {x["step"]: x["learning_rate"] for x in read_log(tmp_path / "a" / "log.jsonl") if "learning_rate" in x}
    # A step's rate is taken before it; half of the cosine is over at step 60.
    assert rates[50] == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * 49 / 120)), rel=1e-4)
    assert rates[120] < 2e-5
    with pytest.raises(ValueError, match="resume must hold a dflash with blocks of 4: got a dfly with 4"):
        train_drafter(config_for(toy, tmp_path / "c", kinds=("dflash",), resume=tmp_path / "a"))


def test_what_is_saved_is_what_was_measured(toy, tmp_path: Path) -> None:
    result = train_drafter(config_for(toy, tmp_path / "a", steps=60))[0]
    base = load_base(str(toy["llama"]), "cpu")
    drafter = Drafter.from_pretrained(result.folder, target=base.decoder)
    again = train_drafter(config_for(toy, tmp_path / "b", steps=60))[0]
    other = Drafter.from_pretrained(again.folder, target=base.decoder)
    context = Context(torch.randn(1, 5, drafter.config.feature_width), torch.ones(1, 5, dtype=torch.bool))
    drafts = []
    for d in (drafter, other):
        d.reset(1, 16)
        drafts.append(d.propose(context, torch.tensor([7]), 3).tokens.tolist())
    # The same seed gives the same drafter.
    assert drafts[0] == drafts[1] and result.held_out == again.held_out


def test_sigterm_ends_the_run_and_saves(toy, tmp_path: Path) -> None:
    seen: list[DraftResult] = []
    timer = threading.Timer(3.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        seen += train_drafter(config_for(toy, tmp_path / "a", steps=None, minutes=5.0))
    finally:
        timer.cancel()
    assert seen[0].seconds < 60 and seen[0].steps > 1
    saved = json.loads((tmp_path / "a" / "config.json").read_text(encoding="utf-8"))
    assert saved["dllm"]["training"]["steps"] == seen[0].steps
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_looping_answers_and_held_out_texts_are_not_trained_on(toy, tmp_path: Path) -> None:
    lines = toy["corpus"].read_text(encoding="utf-8").splitlines()
    looping = json.dumps({"prompt": "say z", "answer": "abcdefgh12" * 6})
    held = json.dumps({"prompt": "say y", "answer": "never seen"})
    (tmp_path / "c.jsonl").write_text("\n".join([looping, *lines[:30], held]) + "\n", encoding="utf-8")
    (tmp_path / "answers.jsonl").write_text("\n".join([looping, *lines[30:50]]) + "\n", encoding="utf-8")
    config = config_for(
        toy, tmp_path / "a", data=(tmp_path / "c.jsonl",), answers=(tmp_path / "answers.jsonl",), held_out=1
    )
    sources, measured = module._sources(config, module.load_tokenizer(config.target))
    assert [(len(d), round(share, 6)) for d, share in sources] == [(30, 0.4), (20, 0.6)]
    assert len(measured) == 1


def test_the_shipped_shapes_have_the_sizes_that_are_promised() -> None:
    from dllm.drafters.dflash import DFlash
    from dllm.drafters.dfly import DFly
    from dllm.model.decoder import Decoder, DecoderConfig

    smollm2 = DecoderConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, 100000.0, tie_embeddings=True)
    config = DraftTrainConfig(out=Path("x"), data=(Path("y"),), steps=1)
    with torch.device("meta"):
        target = Decoder(smollm2)
        sizes = {}
        for cls in (DFlash, DFly):
            kind = "dfly" if cls is DFly else "dflash"
            shape = drafter_config(config, kind, smollm2, 16)
            sizes[kind] = sum(p.numel() for p in cls(shape, target).parameters())
    assert shape.target_layer_ids == (1, 8, 14, 20, 27) and shape.block_length == 8
    assert sizes == {"dflash": 8_740_480, "dfly": 10_400_522}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"minutes": 1.0}, "exactly one of steps and minutes must be given: got 40 and 1.0"),
        ({"steps": 0}, "steps must be >= 1"),
        ({"data": ()}, "data must name at least one file"),
        ({"kinds": ("eagle",)}, "kinds must be distinct ones of dflash, dfly: got eagle"),
        ({"kinds": ("dfly", "dfly")}, "kinds must be distinct ones"),
        ({"anchors": 0}, "anchors must be >= 1: got 0"),
        ({"block_length": 1}, "block_length must be >= 2 and length above it: got 1 and 96"),
        ({"answer_share": 2.0}, r"answer_share must be in \[0, 1\]: got 2.0"),
        ({"optimiser": "sgd"}, "optimiser must be one of muon, adamw: got 'sgd'"),
        ({"mask_token_id": None}, "mask_token_id must be given for the target"),
        ({"mask_token_id": 99}, r"mask_token_id must be in \[0, vocab_size 44\): got 99"),
        ({"target_layer_ids": (0, 2)}, "target_layer_ids must be below the target's 2 layers"),
        ({"eval_new_tokens": 96}, "length must hold a held-out prompt and 96 new tokens: got 96"),
    ],
)
def test_bad_arguments_are_named_and_leave_no_files(toy, tmp_path: Path, change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train_drafter(config_for(toy, tmp_path / "a", **change))
    assert not (tmp_path / "a").exists()


def test_the_command_hands_every_option_on(toy, tmp_path: Path, monkeypatch) -> None:
    import typer

    given: list[DraftTrainConfig] = []
    monkeypatch.setattr(module, "train_drafter", given.append)
    app = typer.Typer()
    app.command()(module.command)
    arguments = (
        f"--out {tmp_path} --data a.npz --kind dfly --kind dflash --answers b.npz --steps 7 --loss kl --label law "
    )
    arguments += "--weights uniform --no-greedy-path --target-layer-ids 1 --target-layer-ids 4 --optimiser adamw"
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    assert given == [
        DraftTrainConfig(
            out=tmp_path,
            data=(Path("a.npz"),),
            kinds=("dfly", "dflash"),
            answers=(Path("b.npz"),),
            steps=7,
            loss=DraftLoss(kind="kl", label="law", weights="uniform", greedy_path=False),
            target_layer_ids=(1, 4),
            optimiser="adamw",
        )
    ]
    wrong = CliRunner().invoke(app, f"--out {tmp_path} --data a.npz --kind dfly".split())
    assert wrong.exit_code == 2 and len(given) == 1


def test_curves_are_a_png_made_of_the_log(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = tmp_path / "log.jsonl"
    value = {"accept_length": 2.0, "rounds": 9, "tokens": 18, "slots": [0.6, 0.3, 0.1]}
    lines = [{"step": 0, "held_out": {"all": value}}, {"step": 50, "loss": 0.5}]
    log.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert plot_draft_curves(log, tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
    log.write_text("\n".join(map(json.dumps, [*lines, {"step": 50, "held_out": {"all": value, "no_loops": value}}])))
    assert plot_draft_curves(log, tmp_path / "b.png") and (tmp_path / "b.png").read_bytes() != data
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png", "log.jsonl"]


@pytest.mark.parametrize("kind", ["dflash", "dfly"])
def test_features_of_any_size_start_at_the_same_weight(toy, tmp_path: Path, kind: str) -> None:
    config = config_for(toy, tmp_path / "a", kinds=(kind,))
    base = load_base(str(toy["llama"]), "cpu")
    sources, _ = module._sources(config, module.load_tokenizer(config.target))
    batch = next(iter(module.DraftBatches(sources, 2, 96, 4, 4, 0)))
    drafter = module._drafter(config, kind, base)
    width = drafter.config.feature_width
    size = torch.linspace(0.1, 50.0, width)
    features = torch.randn(2, 96, width, generator=torch.Generator().manual_seed(0)) * size
    features[batch.position == 0] *= 1e4
    scale = tap_scales(drafter, batch, features)
    assert (scale * size).std() < 0.15 * (scale * size).mean()
    usual = features[(batch.document >= 0) & (batch.position > 0)]
    projected = torch.nn.functional.linear(usual, drafter.fc.weight * scale)
    mean = usual.unflatten(-1, (2, -1)).mean(dim=1)
    wanted = 3**-0.5 if kind == "dflash" else mean.square().mean().sqrt()
    assert float((projected.square().mean().sqrt() / wanted).detach()) == pytest.approx(1.0, abs=0.15)
