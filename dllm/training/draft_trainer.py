"""The training loop of drafters: steps, measurements, logs and saves; one target for all drafters of a run."""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm.drafters.check import template_hash
from dllm.drafters.dfly import CPU_CANDIDATES, DFly
from dllm.drafters.drafter import Drafter
from dllm.drafters.export import save_drafter
from dllm.training.base import SHIPPED_BASE, Base
from dllm.training.data import Documents
from dllm.training.draft_batches import DraftBatch
from dllm.training.draft_config import DraftTrainConfig
from dllm.training.draft_curves import plot_draft_curves
from dllm.training.draft_forward import DraftForward, TargetReader, fused_splits
from dllm.training.draft_loss import SlotHead, block_loss, on_greedy_path
from dllm.training.draft_measure import Acceptance
from dllm.training.forward import Kernel
from dllm.training.muon import MasterOptimiser
from dllm.training.progress import Progress
from dllm.training.stopping import stopping

logger = logging.getLogger(__name__)

STATISTICS = ("slots", "overlap", "right")


@dataclass(frozen=True)
class DraftResult:
    """Where the drafter lies, steps done, seconds of training, the last measurement (see ``Acceptance.measure``)."""

    kind: str
    folder: Path
    steps: int
    seconds: float
    held_out: dict[str, dict[str, Any]]


class Student:
    """A drafter with its optimiser, sums and log."""

    def __init__(self, config: DraftTrainConfig, drafter: Drafter) -> None:
        self.config, self.drafter, self.kind = config, drafter, drafter.config.kind
        self.folder = config.folder(self.kind, config.out)
        self.optimiser: MasterOptimiser | None = None
        self.forward: DraftForward | None = None
        self.head: SlotHead | None = None
        self.sums = torch.zeros(len(STATISTICS) + 1, device=drafter.device)
        self.measured: dict[str, dict[str, Any]] = {}

    def prepare(self, kernel: Kernel, compiled: bool) -> None:
        """Fix kernel and compilation."""
        settings, weight = self.drafter.config, self.drafter.target.head_weight
        assert weight is not None, "a Decoder's head is a matrix"
        self.forward = DraftForward(self.drafter, kernel, compiled)
        self.head = SlotHead(
            weight,
            self.config.loss,
            settings.output_multiplier,
            settings.final_logit_softcapping,
            self.config.chunk,
            compiled,
        )

    def begin(self, batch: DraftBatch, features: Tensor) -> None:
        """Make the optimiser; the size of the target's features is measured on a batch, features [B, L, F]."""
        config, drafter = self.config, self.drafter
        scales = {}
        if config.balance_taps:
            scales["fc.weight"] = tap_scales(drafter, batch, features)
            if config.resume is None:
                # A new projection starts with every feature at the same weight.
                drafter.fc.weight.data.mul_(scales["fc.weight"].to(drafter.dtype))
        self.optimiser = MasterOptimiser(
            drafter, config.optimiser, config.weight_decay, config.clip, fused_splits(drafter.config.body), scales
        )

    def loss(self, batch: DraftBatch, features: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """features [B, L, F], states [B, L, D] of the target -> (loss, sums of ``STATISTICS`` over the slots that count)."""
        assert self.forward is not None and self.head is not None, "prepare comes first"
        slots = batch.slots().flatten(1)
        before = (slots - 1).flatten()
        text = batch.ids.gather(1, slots)
        hidden = self.forward.hidden(batch, features)
        hidden = self.forward.corrected(hidden, batch.ids.gather(1, slots - 1).view(hidden.shape[:3]))
        teacher = None
        if self.config.loss.needs_teacher:
            # The target's law of a slot stands one token before it, after the text's own tokens.
            first = torch.arange(len(slots), device=slots.device) * states.shape[1]
            teacher = states.flatten(0, 1).index_select(0, before + first.repeat_interleave(slots.shape[1]))
        terms = self.head(hidden.flatten(0, 2), teacher, text.flatten()).view(-1, batch.num_slots - 1)
        counted = batch.labelled.flatten(0, 1)
        if self.config.loss.greedy_path:
            counted = counted & on_greedy_path(text.view(counted.shape), terms.greedy)
        loss = block_loss(terms, counted, self.config.loss)
        with torch.no_grad():
            right = (terms.top == terms.greedy) & counted
            sums = torch.stack([counted.sum(), (terms.overlap * counted).sum(), right.sum()]).float()
        return loss, sums

    def step(self, batch: DraftBatch, features: Tensor, states: Tensor, rate: float) -> None:
        """One optimiser step; loss and sums stay on the device."""
        assert self.optimiser is not None, "begin comes first"
        loss, sums = self.loss(batch, features, states)
        loss.backward()
        self.optimiser.step(rate)
        self.sums += torch.cat([loss.detach().float()[None], sums])

    def read(self, steps: int) -> dict[str, float]:
        """Means since the last call; waits for the device. Raises FloatingPointError if the loss is not finite."""
        loss, slots, overlap, right = self.sums.tolist()
        self.sums.zero_()
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss of {self.kind} must be finite: got {loss}")
        return {
            "loss": loss / steps,
            "accuracy": right / max(slots, 1),
            "overlap": overlap / max(slots, 1),
            "slots_per_step": slots / steps,
        }

    def measure(self, acceptance: Acceptance, step: int, seconds: float) -> None:
        """Accepted length on the held-out answers, into the log."""
        assert self.forward is not None, "prepare comes first"
        self.measured = acceptance.measure(self.forward)
        self.write({"step": step, "seconds": round(seconds, 2), "held_out": self.measured})

    def measure_candidates(self, acceptance: Acceptance, step: int, count: int = CPU_CANDIDATES) -> None:
        """The same with a DFly's slots decided among the ``count`` best tokens of the uncorrected row, as on a CPU."""
        drafter = self.drafter
        if self.forward is None or not isinstance(drafter, DFly) or drafter.hidden_correction is None:
            return
        before, drafter.head_candidates = drafter.head_candidates, count
        try:
            self.write({"step": step, "candidates": count, "held_out_candidates": acceptance.measure(self.forward)})
        finally:
            drafter.head_candidates = before

    def write(self, line: dict[str, Any]) -> None:
        """One line of the log."""
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def save(self, metadata: dict[str, Any]) -> None:
        """Drafter and curves; each file is whole or not there, and config.json is the last to change."""
        partial = self.folder / ".saving"
        try:
            save_drafter(self.drafter, partial, dtype=torch.bfloat16, metadata=metadata)
            written = sorted(partial.iterdir(), key=lambda p: (p.name == "config.json", p.name.endswith(".index.json")))
            for path in written:
                path.replace(self.folder / path.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        plot_draft_curves(self.folder / "log.jsonl", self.folder / "curves.png")


class DraftTrainer:
    """The frozen target, the students, and the clock."""

    def __init__(self, config: DraftTrainConfig, base: Base, drafters: list[Drafter], tokenizer: Any) -> None:
        self.config, self.base, self.tokenizer = config, base, tokenizer
        self.students = [Student(config, drafter) for drafter in drafters]
        self.stop = threading.Event()
        device = base.decoder.device
        self.compiled = device.type == "cuda" if config.compiled is None else config.compiled

    def run(self, loader: Iterator[DraftBatch], texts: Documents) -> list[DraftResult]:
        config, device = self.config, self.base.decoder.device
        for student in self.students:
            student.folder.mkdir(parents=True, exist_ok=True)
            (student.folder / "log.jsonl").unlink(missing_ok=True)
        batch = next(loader).to(device)
        reader = self._choose(batch)
        acceptance = Acceptance(texts, reader, config.batch, config.length, config.anchors, config.block_length)
        progress = _DraftProgress(config.steps, None if config.minutes is None else 60 * config.minutes)
        step = logged_step = 0
        with stopping(self.stop), progress:
            features, _ = reader.read(batch)
            for student in self.students:
                student.begin(batch, features)
            self._step(reader, batch, 0.0)
            for student in self.students:
                student.read(1)
                student.measure(acceptance, 0, 0.0)
            progress.begin()
            logged_at = measured_at = saved_at = 0.0
            while not self.stop.is_set() and not progress.done(step):
                rate = self._rate(step, progress.share(step))
                self._step(reader, next(loader).to(device), rate)
                step += 1
                if step % 10 and step != 1 and not progress.done(step):
                    continue
                now = progress.seconds()
                if step - logged_step >= 50 or progress.done(step) or now - logged_at >= 10:
                    done = step - logged_step
                    common = {"steps_per_second": done / max(now - logged_at, 1e-9), "learning_rate": rate}
                    for student in self.students:
                        # Reading waits for the device; the steps in between keep it busy.
                        line = {"step": step, "seconds": round(now, 2), **student.read(done), **common}
                        student.write(line)
                        progress.show_student(step, student.kind, line, student.measured)
                    logged_at, logged_step = now, step
                if now - measured_at >= config.eval_every_s:
                    for student in self.students:
                        student.measure(acceptance, step, now)
                    measured_at = progress.seconds()
                if now - saved_at >= config.save_every_s:
                    self._save(step, now)
                    saved_at = progress.seconds()
            seconds = progress.seconds()
            for student in self.students:
                student.measure(acceptance, step, seconds)
                student.measure_candidates(acceptance, step)
        self._save(step, seconds)
        for student in self.students:
            logger.info("%s: %d steps in %.0f s; held out: %s", student.folder, step, seconds, _words(student.measured))
        return [DraftResult(s.kind, s.folder, step, seconds, s.measured) for s in self.students]

    def _step(self, reader: TargetReader, batch: DraftBatch, rate: float) -> None:
        features, states = reader.read(batch)
        for student in self.students:
            student.step(batch, features, states, rate)

    def _rate(self, step: int, share: float) -> float:
        """Linear warm-up, then a cosine to a thousandth of the peak."""
        rate = max(0.5 * (1 + math.cos(math.pi * min(share, 1.0))), 1e-3)
        return self.config.learning_rate * rate * min(1.0, step / max(1, self.config.warmup))

    def _choose(self, batch: DraftBatch) -> TargetReader:
        """Prepare reader and students with the kernel that is asked for, or with the one that is faster on this batch."""
        wanted = self.config.attention_kernel
        if wanted != "auto" or self.base.decoder.device.type != "cuda":
            return self._prepare("sdpa" if wanted == "auto" else wanted)
        times: dict[Kernel, float] = {}
        kernels: tuple[Kernel, ...] = ("flex", "sdpa")
        for kernel in kernels:
            try:
                times[kernel] = self._time(self._prepare(kernel), batch)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                # A kernel that this PyTorch cannot compile is not chosen; if none works the error is raised.
                if not times and kernel == kernels[-1]:
                    raise
                logger.info("attention kernel %s is off: %s", kernel, str(error).splitlines()[0])
        best = min(times, key=lambda kernel: times[kernel])
        logger.info(
            "attention kernel %s: %s", best, ", ".join(f"{k} {1e3 * s:.1f} ms a step" for k, s in times.items())
        )
        return self._prepare(best)

    def _prepare(self, kernel: Kernel) -> TargetReader:
        for student in self.students:
            student.prepare(kernel, self.compiled)
        return TargetReader(self.base.decoder, self.students[0].drafter.config.target_layer_ids, kernel, self.compiled)

    def _time(self, reader: TargetReader, batch: DraftBatch, steps: int = 6) -> float:
        """Median seconds of a step without the optimiser, the first two (compilation) left out."""
        times = []
        for _ in range(steps + 2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            features, states = reader.read(batch)
            for student in self.students:
                student.loss(batch, features, states)[0].backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            for student in self.students:
                student.drafter.zero_grad(set_to_none=True)
        return sorted(times[2:])[steps // 2]

    def _save(self, step: int, seconds: float) -> None:
        config, on_gpu = self.config, self.base.decoder.device.type == "cuda"
        # Paths in a saved configuration are file names: folders say something about a machine only.
        name = config.target if config.target == SHIPPED_BASE else Path(config.target).name
        settings = json.loads(json.dumps(asdict(replace(config, target=name)), default=lambda path: path.name))
        for student in self.students:
            training = {
                "steps": step,
                "seconds": round(seconds, 1),
                "config": settings,
                "held_out": student.measured,
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            }
            template = template_hash(self.tokenizer)
            student.save({"target": name, "chat_template_sha256": template, "training": training})


class _DraftProgress(Progress):
    """The display with a drafter's figures."""

    def show_student(self, step: int, kind: str, line: dict[str, float], measured: dict[str, dict[str, Any]]) -> None:
        """Put the newest figures of one drafter on the display."""
        share = self.share(step)
        text = (
            f"{kind}, step {step}: loss {line['loss']:.3f}, right {line['accuracy']:.3f}, {line['steps_per_second']:.2f} steps/s; "
            f"accepted {_words(measured)}"
        )
        if self.bar is not None:
            self.bar.update(self.task, completed=share, description=text)
            return
        logger.info("%s; %.0f s left", text, self.seconds() * (1 - share) / max(share, 1e-9))


@torch.no_grad()
def tap_scales(drafter: Drafter, batch: DraftBatch, features: Tensor) -> Tensor:
    """fp32 [F]: one over the root mean square of each feature, for the columns of the projection.

    The last tap of a deep model is several times larger than the first, and a few channels are a hundred times larger than the rest:
    without this the others are hardly heard. The first token of a document, where many models keep huge values, does not count. A DFly
    adds a mean of the taps to the projection, so that there the projection starts at that mean's size.
    """
    seen = features[(batch.document >= 0) & (batch.position > 0)].float()
    scale = seen.square().mean(dim=0).sqrt().clamp(min=1e-6).reciprocal()
    if not isinstance(drafter, DFly):
        return scale
    mean = seen.unflatten(-1, (len(drafter.config.target_layer_ids), -1)).mean(dim=1).square().mean().sqrt()
    # A fresh projection of features of size 1 has the size of its rows.
    return scale * mean * 3**0.5


def _words(measured: dict[str, dict[str, Any]]) -> str:
    return ", ".join(f"{v['accept_length']:.3f} ({k.replace('_', ' ')})" for k, v in measured.items())
