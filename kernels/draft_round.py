"""The end of a draft-and-verify round in one launch: accept, stop, commit, count, and set up the next round.

Letters: B rows, Q slots of a round (the anchor's and n = Q - 1 drafts'), W columns of the stores, T most new tokens.

Rule (greedy, as ``dllm.samplers.verify.greedy`` and ``dllm.speculate_state.RoundState`` have it): a row's first ``min(n, remaining)``
drafts count; they are accepted while they equal the target's own tokens; committed are the accepted ones and the target's next token,
cut at the length limit and behind the first stop token. Plain AR decoding is the case Q = 1.

Bytes moved: a few hundred a row, so the limit is the launch; in plain PyTorch the same is about forty.
"""

# The arguments of kernels are Triton values, which no annotation describes.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dllm.kernels._launch import jit, next_power_of_2, require_launchable, tl, use_triton
from dllm.types import PADDING_GROUP

MAX_SLOTS = 128
ENDED, RUNNING, BROKEN = 0, 1, 2


@dataclass(frozen=True, eq=False)
class RoundBuffers:
    """What rounds read and change, at fixed addresses. int64 [B] unless said otherwise.

    anchor: last committed token; lengths: its position; produced, remaining: new tokens so far and still allowed; limits: drafts of the
    coming round that count; passes, drafted, computed: verify passes, those with drafts, rows that counted; active, stopped, broken:
    bool, still running, ended by a stop token, had a law that is not finite; status int32: ``ENDED``, ``RUNNING`` or ``BROKEN``.
    out [B, T + 1]: new tokens; log [B, T + 1]: tokens committed by each pass; key_group [B, W] int32: 0 where a committed token before
    the anchor is stored, else ``PADDING_GROUP``; place [B, Q]: positions of the coming round's rows; eos [E]: stop tokens.
    """

    anchor: Tensor
    lengths: Tensor
    produced: Tensor
    remaining: Tensor
    limits: Tensor
    passes: Tensor
    drafted: Tensor
    computed: Tensor
    active: Tensor
    stopped: Tensor
    broken: Tensor
    status: Tensor
    out: Tensor
    log: Tensor
    key_group: Tensor
    place: Tensor
    eos: Tensor

    @classmethod
    def idle(
        cls, batch: int, slots: int, columns: int, most_new: int, num_eos: int, device: torch.device | str
    ) -> RoundBuffers:
        """Buffers of rows that are over, so that a round over them changes nothing that counts."""
        shapes = {
            "out": (batch, most_new + 1), "log": (batch, most_new + 1), "key_group": (batch, columns), "place": (batch, slots),
            "eos": (num_eos,),
        }  # fmt: skip
        kinds = {"active": torch.bool, "stopped": torch.bool, "broken": torch.bool}
        kinds |= {"status": torch.int32, "key_group": torch.int32}
        made = {
            f.name: torch.zeros(shapes.get(f.name, (batch,)), dtype=kinds.get(f.name, torch.int64), device=device)
            for f in fields(cls)
        }
        made["key_group"].fill_(PADDING_GROUP)
        return cls(**made)

    def aim(self) -> None:
        """Set what the coming round reads from ``lengths``, ``remaining`` and ``active``; mutates limits, place, key_group, status."""
        drafts = self.place.shape[1] - 1
        self.limits.copy_(self.remaining.clamp(max=drafts) * self.active)
        self.place.copy_(self.lengths[:, None] + torch.arange(drafts + 1, device=self.place.device))
        column = torch.arange(self.key_group.shape[1], device=self.place.device)
        self.key_group.copy_(torch.where(column < self.lengths[:, None], 0, PADDING_GROUP))
        self.status.copy_(torch.where(self.broken, BROKEN, self.active.to(torch.int32)))


def commit_round_reference(state: RoundBuffers, target_tokens: Tensor, log_total: Tensor, tokens: Tensor) -> None:
    """Truth of ``commit_round``."""
    width = tokens.shape[1]
    slots = torch.arange(width, device=tokens.device)
    ran, limits = state.active.clone(), state.limits
    within = slots < limits[:, None]
    padded = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
    accepted = ((target_tokens == padded) & within).to(torch.int64).cumprod(1).sum(1)
    count = torch.minimum(accepted + 1, state.remaining) * ran
    ends = (target_tokens[..., None] == state.eos).any(-1) & (slots < count[:, None])
    first = torch.where(ends, slots, width).amin(1)
    count = torch.minimum(count, first + 1)
    bin_column = state.out.shape[1] - 1
    # Accepted drafts are the target's own tokens, so its row holds all that is committed.
    places = torch.where(slots < count[:, None], state.produced[:, None] + slots, bin_column)
    state.out.scatter_(1, places, target_tokens)
    state.log.scatter_(1, torch.where(ran, state.passes, bin_column)[:, None], count[:, None])
    state.computed.add_((limits + 1) * ran)
    state.passes.add_(ran)
    state.drafted.add_(ran & (limits > 0))
    last = target_tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    state.anchor.copy_(torch.where(ran, last, state.anchor))
    state.lengths.add_(count)
    state.produced.add_(count)
    state.remaining.sub_(count)
    state.stopped.logical_or_(first < width)
    state.broken.logical_or_((~log_total.isfinite() & (slots <= limits[:, None])).any(1) & ran)
    state.active.copy_(ran & ~state.stopped & ~state.broken & (state.remaining > 0))
    state.aim()


@jit
def _commit_kernel(
    target, log_total, tokens, anchor_ptr, lengths_ptr, produced_ptr, remaining_ptr, limits_ptr, passes_ptr, drafted_ptr, computed_ptr,
    active_ptr, stopped_ptr, broken_ptr, status_ptr, out_ptr, log_ptr, key_group_ptr, place_ptr, eos_ptr,
    most, columns,
    NUM_EOS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    real = slot < SLOTS
    ran = tl.load(active_ptr + row) != 0
    step = ran.to(tl.int64)
    left = tl.load(remaining_ptr + row)
    limit = tl.load(limits_ptr + row)
    length = tl.load(lengths_ptr + row)
    produced = tl.load(produced_ptr + row)
    passes = tl.load(passes_ptr + row)
    own = tl.load(target + row * SLOTS + slot, mask=real, other=0)
    draft = tl.load(tokens + row * SLOTS + slot + 1, mask=slot < SLOTS - 1, other=0)
    total = tl.load(log_total + row * SLOTS + slot, mask=real, other=0.0)

    accepted = tl.min(tl.where((own == draft) & (slot < limit), BLOCK, slot), axis=0).to(tl.int64)
    count = tl.minimum(accepted + 1, left) * step
    stop = slot < 0
    for e in tl.static_range(0, NUM_EOS):
        stop = stop | (own == tl.load(eos_ptr + e))
    first = tl.min(tl.where(stop & (slot < count), slot, BLOCK), axis=0).to(tl.int64)
    count = tl.minimum(count, first + 1)
    tl.store(out_ptr + row * most + produced + slot, own, mask=slot < count)
    tl.store(log_ptr + row * most + passes, count, mask=ran)
    last = tl.sum(tl.where(slot == count - 1, own, 0), axis=0)
    tl.store(anchor_ptr + row, last, mask=ran)

    # NaN is unequal to itself.
    finite = (total == total) & (tl.abs(total) < float("inf"))
    bad = (slot <= limit) & real & (finite.to(tl.int32) == 0)
    broken = (tl.load(broken_ptr + row) != 0) | (ran & (tl.max(bad.to(tl.int32), axis=0) != 0))
    stopped = (tl.load(stopped_ptr + row) != 0) | (first < BLOCK)
    left -= count
    ended = broken | stopped | (left <= 0)
    running = step * (1 - ended.to(tl.int64))
    tl.store(stopped_ptr + row, stopped.to(tl.uint8))
    tl.store(broken_ptr + row, broken.to(tl.uint8))
    tl.store(active_ptr + row, running.to(tl.uint8))
    tl.store(status_ptr + row, tl.where(broken, 2, running).to(tl.int32))
    tl.store(lengths_ptr + row, length + count)
    tl.store(produced_ptr + row, produced + count)
    tl.store(remaining_ptr + row, left)
    tl.store(limits_ptr + row, tl.minimum(left, SLOTS - 1) * running)
    tl.store(passes_ptr + row, passes + step)
    tl.store(drafted_ptr + row, tl.load(drafted_ptr + row) + step * (limit > 0).to(tl.int64))
    tl.store(computed_ptr + row, tl.load(computed_ptr + row) + step * (limit + 1))
    tl.store(key_group_ptr + row * columns + length + slot, tl.zeros([BLOCK], tl.int32), mask=slot < count)
    tl.store(place_ptr + row * SLOTS + slot, length + count + slot, mask=real)


def commit_round_triton(state: RoundBuffers, target_tokens: Tensor, log_total: Tensor, tokens: Tensor) -> None:
    """Launch the kernel; arguments as ``commit_round``."""
    require_launchable(tokens, "tokens")
    _check(state, target_tokens, log_total, tokens)
    batch, slots = tokens.shape
    _commit_kernel[(batch,)](
        target_tokens.contiguous(), log_total.contiguous(), tokens.contiguous(), state.anchor, state.lengths, state.produced,
        state.remaining, state.limits, state.passes, state.drafted, state.computed, _bytes(state.active), _bytes(state.stopped),
        _bytes(state.broken), state.status, state.out, state.log, state.key_group, state.place, state.eos,
        state.out.shape[1], state.key_group.shape[1],
        NUM_EOS=state.eos.numel(), SLOTS=slots, BLOCK=max(2, next_power_of_2(slots)), num_warps=1,
    )  # fmt: skip


def commit_round(state: RoundBuffers, target_tokens: Tensor, log_total: Tensor, tokens: Tensor) -> None:
    """End a round; mutates every buffer but ``eos``.

    tokens [B, Q] int64: the anchors and their drafts; target_tokens [B, Q] int64: the target's own token behind each of them;
    log_total [B, Q] fp32: log-sum-exp of its laws. A row whose law is not finite where it counts is broken and ends. Raises ValueError
    for shapes and types that do not fit, or more than 128 slots.
    """
    if use_triton(tokens):
        commit_round_triton(state, target_tokens, log_total, tokens)
        return
    _check(state, target_tokens, log_total, tokens)
    commit_round_reference(state, target_tokens, log_total, tokens)


def _check(state: RoundBuffers, target_tokens: Tensor, log_total: Tensor, tokens: Tensor) -> None:
    shape = state.place.shape
    if shape[1] > MAX_SLOTS:
        raise ValueError(f"tokens must have at most {MAX_SLOTS} slots: got {shape[1]}")
    for name, value in (("target_tokens", target_tokens), ("log_total", log_total), ("tokens", tokens)):
        dtype = torch.float32 if name == "log_total" else torch.int64
        if value.shape != shape or value.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {list(shape)}: got {value.dtype} {list(value.shape)}")


def _bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)
