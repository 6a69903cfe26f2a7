"""AR-guided unmasking as captured steps: a draft of the diffusion model, and readings of it by the guide until its block is full.

Two steps are captured. With one reading a draft they take turns, and the host looks at a flag some steps late; where a draft is read
until its block is full, the host picks the next step by the flag behind each reading. The rule must be lossless (``accept="exact"``,
``on_reject="ar"``, temperature 0; ``dllm/device_hooks.py`` says what else must hold). Tokens, finish reasons and counters equal those of
``GuideHook`` in ``dllm/denoise.py``, which stays the truth, and whose first reading, the one with the prompt, is run here as it is there.

Letters: B rows of the batch, W columns of the canvas, S slots of a block.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from dllm.denoise import DenoiseLoop
from dllm.device_hooks import guide_of
from dllm.device_loop import STEPS_PER_POLL, DeviceStep
from dllm.graphs import Captured, Poll, capture
from dllm.hooks import GuideHook
from dllm.kernels.guide_step import FAULT, WANTS_READING, GuideBuffers, commit_reading, plan_reading, take_draft
from dllm.kernels.lm_head_stats import lm_head_stats
from dllm.model.fast_decoder import FastDecoder
from dllm.request import DenoiseRequest
from dllm.types import LOWEST_GROUP, Attend, pack_bits


class GuidedStep(DeviceStep):
    """``step`` drafts the open blocks, ``read`` lets the guide read them; both are captured."""

    def __init__(self, model: Any, request: DenoiseRequest, batch: int, width: int) -> None:
        guide = guide_of(request)
        assert guide is not None, "for requests with a guide"
        assert isinstance(request.block_length, int), "supports passes whole block lengths only"
        device, slots = request.canvas.ids.device, request.block_length
        self.guide = GuideBuffers.idle(batch, slots, width, device)
        self.one_reading = guide.rule.guide_passes == 1
        self.reader = FastDecoder(guide.model)
        self.reader_store = self.reader.new_store(batch, width)
        self.reader_group = torch.zeros(batch, slots, dtype=torch.int32, device=device)
        self.reader_low = torch.full_like(self.reader_group, LOWEST_GROUP)
        causal = torch.ones(slots, slots, dtype=torch.bool, device=device).tril()
        self.reader_bits = pack_bits(causal.expand(batch, -1, -1))
        self.first: tuple[GuideHook, int] | None = None
        self.prompt_s = 0.0
        super().__init__(model, request, batch, width)
        self.now = Poll(self.status, lag=0)
        self.reading: Captured = capture(self.read, device, owned=(guide.model,), name="reading of a guide")

    def load(self, loop: DenoiseLoop) -> None:
        """As ``DeviceStep.load``."""
        super().load(loop)
        self.guide.reset()
        assert isinstance(loop.hook, GuideHook), "only a guide with the same ids reads on the device"
        self.first = (loop.hook, max(row.hi for row in loop.rows) - 1)

    def run(self, steps_per_poll: int = STEPS_PER_POLL) -> None:
        """Draft and read until no row is active; what runs after that changes nothing."""
        self.captured.replay()
        self._wait()
        began = time.perf_counter()
        self._read_prompts()
        self._wait()
        self.prompt_s = time.perf_counter() - began
        if self.one_reading:
            late: list[int] | None = None
            while late is None or (any(late) and FAULT not in late):
                for _ in range(steps_per_poll):
                    self.captured.replay()
                    self.reading.replay()
                self.poll.post()
                late = self.poll.read()
            return
        while True:
            self.now.post()
            status = self.now.read()
            assert status is not None, "a poll without lag always answers"
            if FAULT in status or not any(status):
                return
            if WANTS_READING not in status:
                self.captured.replay()
            self.reading.replay()

    def unload(self, loop: DenoiseLoop) -> None:
        """As ``DeviceStep.unload``; raises ValueError where the guide's logits were not finite."""
        if bool(self.guide.broken.any()):
            raise ValueError("the guide's logits must be finite: got NaN or infinity")
        rows = loop.rows
        # The guide reads the prompt in its first reading: prefill, of which the block's own rows are the smallest part.
        loop.stats.prefill_s += self.prompt_s
        super().unload(loop)
        # Every reading commits a token of each row that takes part.
        accepts = self.guide.accepts[:, self.guide.accepts.any(0)].tolist()
        for number in range(len(accepts[0])):
            loop.stats.guide_nfe += 1
            for row, counts in zip(rows, accepts, strict=True):
                if counts[number]:
                    row.stats.guide_nfe += 1
                    row.stats.accept_lengths.append(counts[number])
                    loop.stats.accept_lengths.append(counts[number])

    def _fused_step(self) -> None:
        laws = self._fused_laws()
        assert laws.log_total is not None, "row_stats must give log_total"
        take_draft(self.buffers, self.guide, laws.token, laws.log_total)

    @torch.no_grad()
    def read(self) -> None:
        """One reading of every row that has a draft; mutates the buffers, never looks at a value on the host."""
        plan = plan_reading(self.buffers, self.guide)
        attend = Attend(plan.key_group, self.reader_low, self.reader_group, self.reader_bits)
        hidden = self.reader(plan.ids, plan.place, self.reader_store, attend, rows=plan.place, write=plan.write)
        self._judge(hidden)

    @torch.no_grad()
    def _read_prompts(self) -> None:
        """The first reading, over the whole prompts: run once a call, so it is not captured."""
        assert self.first is not None, "load comes first"
        (hook, length), self.first = self.first, None
        slots = self.state.lo[:, None] + self.columns
        inside = self.state.masked.gather(1, slots.clamp(max=self.width - 1)) & (slots < self.state.hi[:, None])
        text = self.wide["canvas"].scatter(1, torch.where(inside, slots, self.width), self.guide.draft)
        valid = torch.arange(length, device=self.device) < self.state.hi[:, None] - 1
        hidden = hook.run.forward(text[:, :length], torch.zeros_like(self.state.hi), valid)
        self.reader_store.data[..., :length, :] = hook.run.store.data[..., :length, :]
        place = plan_reading(self.buffers, self.guide).place.clamp(max=length - 1)
        self._judge(hidden.gather(1, place[..., None].expand(-1, -1, hidden.shape[-1])))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _judge(self, hidden: Tensor) -> None:
        """hidden [B, S, E]: the guide's rows, each of which predicts the slot behind it."""
        # The guide's law is that of the ids that it may write.
        laws = lm_head_stats(hidden, self.reader.decoder.head_weight, banned=self.banned, drop_banned=True)
        commit_reading(
            self.buffers, self.guide, self.rule, laws.token, laws.confidence, laws.log_total, self.one_reading
        )
