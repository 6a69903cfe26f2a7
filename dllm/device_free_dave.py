"""FreeDave as captured steps: what the branches of ``kernels/denoise_step.py`` need beside ``DeviceStep``.

Tokens, finish reasons and counters equal those of ``FreeDaveHook`` in ``dllm/denoise.py``; ``dllm/device_hooks.py`` says which requests
run here. Letters: B rows of the batch, W columns of the canvas, S slots of a block, K draft steps.
"""

from __future__ import annotations

from typing import Any

from dllm.denoise import DenoiseLoop
from dllm.device_hooks import free_dave
from dllm.device_loop import DeviceStep
from dllm.hooks_free_dave import FreeDaveHook
from dllm.kernels.denoise_step import DraftBuffers
from dllm.request import DenoiseRequest


class FreeDaveStep(DeviceStep):
    """``DeviceStep`` with the draft that one step leaves to the next."""

    draft: DraftBuffers

    def __init__(self, model: Any, request: DenoiseRequest, batch: int, width: int) -> None:
        verifier = free_dave(request)
        assert verifier is not None, "for requests with FreeDave"
        assert isinstance(request.block_length, int), "supports passes whole block lengths only"
        self.draft = DraftBuffers.idle(
            batch, request.block_length, width, verifier.draft_steps, request.canvas.ids.device
        )
        super().__init__(model, request, batch, width)

    def load(self, loop: DenoiseLoop) -> None:
        """As ``DeviceStep.load``, with what the first forward drafted if it decoded rows (those without anything to prefill)."""
        super().load(loop)
        draft, hook = self.draft, loop.hook
        assert isinstance(hook, FreeDaveHook), "for requests with FreeDave"
        draft.branches.zero_()
        draft.verified.zero_()
        if hook.lo is None:
            return
        slots = (self.state.lo[:, None] + self.columns).clamp(max=loop.state.canvas.shape[1] - 1)
        shown = hook.reveal.gather(2, slots[:, None].expand(-1, hook.reveal.shape[1], -1))
        # Branches are nested: the first that reveals a slot is the number of those that do not, plus one.
        draft.reveal.copy_((~shown).sum(1) + 1)
        draft.guess.copy_(hook.draft.gather(1, slots))
        draft.branches.copy_((hook.exists & (hook.lo == loop.state.lo)[:, None]).sum(1))

    def unload(self, loop: DenoiseLoop) -> None:
        """As ``DeviceStep.unload``."""
        rows, draft = loop.rows, self.draft
        super().unload(loop)
        verified, accepts = draft.verified.tolist(), draft.accepts.tolist()
        for step in range(max(verified)):
            for b, row in enumerate(rows):
                if step < verified[b]:
                    row.stats.accept_lengths.append(accepts[b][step])
                    loop.stats.accept_lengths.append(accepts[b][step])
