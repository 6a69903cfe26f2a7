"""Shadow rows: the open block a second time, as masks that see everything except the slot they stand for (WINO, arXiv:2507.18578)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.types import Attend, Plan, RowStats, pack_bits
from dllm.walk import BlockWalk


def with_shadow(attend: Attend, rows: Tensor, valid: Tensor, slots: Tensor, inside: Tensor) -> Attend:
    """Attend of the new rows [B, Q] followed by one shadow row for each of slots [B, S].

    The rows of the forward never see a shadow. A shadow row sees what the row of its slot sees (stored keys and new rows), without that
    row, and all shadows of the block. rows [B, Q] are canvas positions, valid [B, Q]; inside [B, S] bool: slots of the row's own block.
    Raises ValueError where such a slot has no row among the new ones.
    """
    same = (slots[:, :, None] == rows[:, None, :]) & valid[:, None, :]
    if not bool((same.any(-1) | ~inside).all()):
        raise ValueError(
            "cache must compute all rows of the open block in each forward for a sampler with shadow rows: this one left some out; "
            "use 'none', 'block', 'dual', 'prefix' or 'free'"
        )
    place = same.long().argmax(-1)
    seen = attend.new_mask
    queries = seen.shape[1]
    of_slot = seen.gather(1, place[..., None].expand(-1, -1, queries)) & ~same
    among = inside[:, :, None] & inside[:, None, :] | torch.eye(slots.shape[1], dtype=torch.bool, device=slots.device)
    top = F.pad(seen, (0, slots.shape[1]))
    mask = torch.cat([top, torch.cat([of_slot, among], dim=2)], dim=1)
    low = torch.cat([attend.low, attend.low.gather(1, place)], dim=1)
    group = torch.cat([attend.group, attend.group.gather(1, place)], dim=1)
    return Attend(attend.key_group, low, group, pack_bits(mask))


class Shadow:
    """Shadow rows of one call: appended to each forward, cut off its result, read as the laws by which commits are judged."""

    def __init__(self, model: Any, walk: BlockWalk) -> None:
        self.model, self.walk = model, walk
        self.hidden: Tensor | None = None
        self.counts: Tensor | int = 0

    def extend(
        self,
        plan: Plan,
        rows: Tensor,
        attend: Attend,
        embeds: Tensor,
        positions: Tensor,
        write: Tensor | None,
    ) -> tuple[Tensor, Attend, Tensor, Tensor, Tensor | None]:
        """(rows, attend, embeds, positions, write) of the forward, with one shadow row for each slot of the open blocks."""
        state = self.walk.state
        width = max(row.hi - row.lo for row in self.walk.rows)
        slots = state.lo[:, None] + torch.arange(width, device=state.lo.device)
        inside = (slots < state.hi[:, None]) & plan.decode[:, None]
        slots = slots.clamp(max=state.canvas.shape[1] - 1)
        self.counts = inside.sum(-1)
        masks = self.model.embed(torch.zeros_like(slots), torch.ones_like(inside), state.spec.mask_token_id)
        return (
            torch.cat([rows, slots], dim=1),
            with_shadow(attend, rows, plan.valid, slots, inside),
            torch.cat([embeds, masks], dim=1),
            torch.cat([positions, state.position.gather(1, slots)], dim=1),
            None if write is None else F.pad(write, (0, width)),
        )

    def split(self, hidden: Tensor, queries: int) -> Tensor:
        """The hidden states of the forward's own rows [B, Q, D]; keeps the others."""
        self.hidden = hidden[:, queries:]
        return hidden[:, :queries]

    def laws(self, canvas: Tensor) -> RowStats:
        """For each slot the token that stands in canvas [B, S], and its probability under the shadow's law."""
        assert self.hidden is not None, "a shadow is judged after a forward"
        law = self.model.head(self.hidden).float().softmax(-1)
        return RowStats(canvas, law.gather(-1, canvas[..., None])[..., 0])
