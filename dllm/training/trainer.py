"""The training loop of an adaptation: steps, measurements, log and saves."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dllm.model.adapter import AdapterConfig, adapter_state, fingerprint
from dllm.model.decoder import Decoder
from dllm.model.weights import save_safetensors
from dllm.training.adapt_config import AdaptConfig
from dllm.training.base import Base
from dllm.training.corruption import CorruptionConfig
from dllm.training.curves import plot_curves
from dllm.training.forward import TrainingForward, choose_kernel, slot_loss
from dllm.training.layout import KIND_NAMES
from dllm.training.packing import Batch
from dllm.training.progress import Progress
from dllm.training.stopping import stopping
from dllm.types import DecodeSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdaptResult:
    """Where the adapter lies, steps done, seconds of training, and the last measurement by kind of slot."""

    folder: Path
    steps: int
    seconds: float
    held_out: dict[str, dict[str, float]]


class Trainer:
    """Model, optimiser and log of one run."""

    def __init__(
        self,
        config: AdaptConfig,
        base: Base,
        model: Decoder,
        corruption: CorruptionConfig,
        tokens: dict[str, int],
    ) -> None:
        self.config, self.base, self.model, self.corruption = config, base, model, corruption
        self.tokens = tokens
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        lora = [p for name, p in trained if "lora_" in name]
        other = [p for name, p in trained if "lora_" not in name]
        self.parameters = [*lora, *other]
        self.optimiser = torch.optim.AdamW(
            [{"params": lora, "peak": config.learning_rate}, {"params": other, "peak": config.norm_learning_rate}],
            lr=0.0,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=base.decoder.device.type == "cuda",
        )
        self.log = config.out / "log.jsonl"
        self.stop = threading.Event()
        self.measured: dict[str, dict[str, float]] = {}

    def run(self, loader: Iterator[Batch], fixed: list[Batch]) -> AdaptResult:
        config, device = self.config, self.base.decoder.device
        config.out.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        compiled = device.type == "cuda" if config.compiled is None else config.compiled
        first = next(loader).to(device)
        if config.attention_kernel == "auto":
            forward = choose_kernel(self.model, first, compiled)
        else:
            forward = TrainingForward(self.model, config.attention_kernel, compiled)
        progress = Progress(config.steps, None if config.minutes is None else 60 * config.minutes)
        step, batch = 0, first
        sums = torch.zeros(len(KIND_NAMES), 4, device=device)
        loss_sum = torch.zeros((), device=device)
        with stopping(self.stop), progress:
            self._step(forward, batch, 0.0, warm=True)
            self.measure(forward, fixed, 0, 0.0)
            progress.begin()
            logged_at, measured_at, saved_at, logged_step = 0.0, 0.0, 0.0, 0
            while not self.stop.is_set() and not progress.done(step):
                batch = next(loader).to(device)
                loss, terms = self._step(forward, batch, progress.share(step), warm=step < config.warmup, step=step)
                step += 1
                sums += terms
                loss_sum += loss.detach()
                if step % 10 and step != 1:
                    continue
                # Reading the sums waits for the device; ten steps in flight are enough to keep it busy.
                values, total = sums.tolist(), float(loss_sum)
                now = progress.seconds()
                if not math.isfinite(total):
                    raise FloatingPointError(f"loss is not finite at step {step}: got {total}")
                if step - logged_step >= 50 or progress.done(step) or now - logged_at >= 10:
                    done = step - logged_step
                    slots, right = sum(v[0] for v in values), sum(v[2] for v in values)
                    line = {
                        "step": step,
                        "seconds": round(now, 2),
                        "loss": total / done,
                        "accuracy": right / max(slots, 1),
                        "slots_per_step": slots / done,
                        "steps_per_second": done / max(now - logged_at, 1e-9),
                        "learning_rate": self.optimiser.param_groups[0]["lr"],
                    }
                    self._write(line)
                    progress.show(step, line, self.measured)
                    sums.zero_()
                    loss_sum.zero_()
                    logged_at, logged_step = now, step
                if now - measured_at >= config.eval_every_s:
                    self.measure(forward, fixed, step, now)
                    measured_at = now
                if now - saved_at >= config.save_every_s:
                    self.save(step, now)
                    saved_at = now
            seconds = progress.seconds()
            self.measure(forward, fixed, step, seconds)
        self.save(step, seconds)
        logger.info("%s: %d steps in %.0f s; held out: %s", config.out, step, seconds, _words(self.measured))
        return AdaptResult(config.out, step, seconds, self.measured)

    def _step(
        self, forward: TrainingForward, batch: Batch, share: float, warm: bool, step: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimiser step at ``share`` of the run; returns the loss and the sums by kind, still on the device."""
        config = self.config
        rate = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
        if warm:
            rate *= step / max(1, config.warmup)
        for group in self.optimiser.param_groups:
            group["lr"] = group["peak"] * max(rate, 1e-3 if not warm else 0.0)
        loss, terms = slot_loss(self.model, forward.hidden(batch), batch, certainty_weight=config.certainty_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, config.clip, foreach=True)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss, terms

    @torch.no_grad()
    def measure(self, forward: TrainingForward, fixed: list[Batch], step: int, seconds: float) -> None:
        """Masked cross-entropy, accuracy and share of sure slots on the held-out batches, by kind, into the log."""
        sums = torch.zeros(len(KIND_NAMES), 4, device=self.base.decoder.device)
        for batch in fixed:
            sums += slot_loss(self.model, forward.hidden(batch), batch)[1]
        self.measured = {
            name: {"slots": n, "cross_entropy": entropy / n, "accuracy": right / n, "sure": sure / n}
            for name, (n, entropy, right, sure) in zip(KIND_NAMES, sums.tolist(), strict=True)
            if n
        }
        self._write({"step": step, "seconds": round(seconds, 2), "held_out": self.measured})

    def save(self, step: int, seconds: float) -> None:
        """Write shards, config and curves; each file is whole or not there."""
        config, base = self.config, self.base
        spec = DecodeSpec(
            mask_token_id=self.tokens["mask_token_id"],
            eos_token_ids=base.spec.eos_token_ids or (self.corruption.stop_token_id,),
            logits_shift=1,
            attention=config.attention,
            block_length=config.block_length,
            max_positions=base.decoder.config.max_positions,
            vocab_size=base.decoder.config.vocab_size,
            first_slot="commit_first" if config.attention == "block_causal" else "free",
            block_origin="prompt",
            infill="rank" if config.attention == "block_causal" else "canvas",
            filler_token_id=self.tokens["filler_token_id"],
            document_start_id=self.tokens["start_token_id"],
            default_cache="block" if config.attention == "block_causal" else "none",
        )
        adapter = AdapterConfig(
            base=base.name,
            base_fingerprint=fingerprint(base.decoder),
            rank=config.rank,
            alpha=config.lora_alpha,
            spec=asdict(spec),
            training={
                "steps": step,
                "seconds": round(seconds, 1),
                "config": json.loads(json.dumps(asdict(config), default=_name)),
                "corruption": asdict(self.corruption),
                "held_out": self.measured,
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if base.decoder.device.type == "cuda" else "cpu",
            },
        )
        save_safetensors(adapter_state(self.model), config.out, name="adapter")
        adapter.save(config.out)
        plot_curves(self.log, config.out / "curves.png")

    def _write(self, line: dict[str, Any]) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _words(measured: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{k} {v['cross_entropy']:.3f} nats, {v['accuracy']:.3f} right" for k, v in measured.items())


def _name(value: object) -> str:
    """Paths in a saved configuration are file names: folders say something about a machine only."""
    return value.name if isinstance(value, Path) else str(value)
