"""How a draft is judged, on the device: greedy matching, chain rejection sampling, block verification, each with its next token.

Formulas (``dllm.samplers.verify`` holds the readable ones; these give the same numbers): with p_k, q_k the target's and the drafter's
law of slot k and d_k the draft, chain (Leviathan et al. 2023, arXiv:2211.17192) accepts d_k while u_k < p_k(d_k) / q_k(d_k); block (Sun
et al. 2024, arXiv:2403.10444) accepts the longest prefix i with u_i < h_i, h from P_i = min(1, P_{i-1} p_i / q_i) and S_i = sum_v
max(P_i p_{i+1} - q_{i+1}, 0). The next token is drawn from max(P p - q, 0) of the first slot that was not accepted, by inversion with
the last number.

For loops of one's own, and the only kernels here for drafts that are sampled. The captured greedy rounds (``dllm/speculate_device.py``) use
``draft_round.commit_round`` instead, which accepts by the same greedy rule and also commits, stops and sets up the next round.

Launches: acceptance (one program a row), partial sums of the residual by split of the vocabulary, then the draw, which reads one split
again; block adds the sums S_i before. Bytes moved: the drafted entries, and V * 4 * 2 a row (p and q of one slot); block: V * 4 * 2 *
(n - 1) a row more.
"""

# The arguments of kernels are Triton values, which no annotation describes.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dllm.kernels._launch import ceil_div, jit, multiprocessors, next_power_of_2, require_launchable, tl, use_triton

MAX_DRAFTS = 128
_TILE = 2048


class Verified(NamedTuple):
    """accepted [B] int64: accepted drafts, 0..n; next_token [B] int64: the token after them; tokens [B, n + 1] int64: accepted drafts, then

    ``next_token`` in every slot that follows.
    """

    accepted: Tensor
    next_token: Tensor
    tokens: Tensor


def verify_greedy_reference(target_tokens: Tensor, draft_tokens: Tensor, lengths: Tensor | None = None) -> Verified:
    """Plain PyTorch truth: drafts are accepted while they equal the target's own token.

    target_tokens [B, n + 1], draft_tokens [B, n] int64; lengths [B] int64: drafts of each row that count (None: all n).
    """
    count = draft_tokens.shape[1]
    accepted = _prefix((target_tokens[:, :count] == draft_tokens) & _within(draft_tokens, lengths))
    return _verified(accepted, target_tokens.gather(1, accepted[:, None])[:, 0], draft_tokens)


def verify_sampled_reference(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    uniform: Tensor,
    lengths: Tensor | None = None,
    block: bool = False,
) -> Verified:
    """Plain PyTorch truth of chain rejection sampling, or (block) of block verification.

    target_probs [B, n + 1, V] fp32, the processed law of each slot; draft_tokens [B, n] int64; draft_probs [B, n, V] fp32, the laws
    that they were drawn from (None: one-hot); uniform [B, n + 1] fp32 in (0, 1): n tests and one draw; lengths [B] int64 (None: all n).
    """
    count = draft_tokens.shape[1]
    within = _within(draft_tokens, lengths)
    p = target_probs[:, :count].gather(-1, draft_tokens[..., None])[..., 0]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(-1, draft_tokens[..., None])[..., 0]
    ratio = torch.where(q > 0, p / q, (p > 0).to(p.dtype))
    scale = torch.ones_like(target_probs[:, 0, 0])
    if block:
        weights = [scale]
        for i in range(count):
            weights.append((weights[-1] * ratio[:, i]).clamp(max=1))
        weight = torch.stack(weights, 1)
        if draft_probs is None:
            excess = weight[:, 1:-1] * (1 - p[:, 1:])
        else:
            excess = (weight[:, 1:-1, None] * target_probs[:, 1:count] - draft_probs[:, 1:]).clamp(min=0).sum(-1)
        passed = uniform[:, :count] < _block_threshold(excess, weight, within)
        slot = torch.arange(1, count + 1, device=passed.device)
        accepted = torch.cat([torch.zeros_like(within[:, :0], dtype=torch.int64), passed * slot], 1)
        accepted = accepted.amax(1) if count else torch.zeros_like(scale, dtype=torch.int64)
        scale = weight.gather(1, accepted[:, None])[:, 0]
    else:
        accepted = _prefix((uniform[:, :count] < ratio.clamp(max=1)) & within)
    law = target_probs.gather(1, accepted[:, None, None].expand(-1, 1, target_probs.shape[-1]))[:, 0]
    if count:
        place = accepted.clamp(max=count - 1)
        tested = within.gather(1, place[:, None]) & (accepted < count)[:, None]
        rest = scale[:, None] * law
        if draft_probs is None:
            rest = rest.scatter(1, draft_tokens.gather(1, place[:, None]), 0.0)
        else:
            rest = rest - draft_probs.gather(1, place[:, None, None].expand(-1, 1, law.shape[-1]))[:, 0]
        rest = rest.clamp(min=0)
        # No mass left is rounding: then p and q agree, and p is the law.
        law = torch.where(tested & (rest.sum(-1, keepdim=True) > 0), rest, law)
    cumulative = law.double().cumsum(-1)
    target = uniform[:, -1:].double() * cumulative[:, -1:]
    token = (cumulative <= target).sum(-1).clamp(max=law.shape[-1] - 1)
    return _verified(accepted, token, draft_tokens)


def _block_threshold(excess: Tensor, weight: Tensor, within: Tensor) -> Tensor:
    """h_i of prefix length i = 1..n [B, n]: S / (S + 1 - P); P itself at a row's last draft, 0 beyond it."""
    if not within.shape[1]:
        return weight[:, 1:]
    denominator = excess + 1 - weight[:, 1:-1]
    threshold = torch.where(denominator > 0, excess / denominator, torch.ones_like(excess))
    threshold = torch.cat([threshold, weight[:, -1:]], 1)
    final = within & ~torch.nn.functional.pad(within[:, 1:], (0, 1))
    return torch.where(final, weight[:, 1:], threshold) * within


def _within(draft_tokens: Tensor, lengths: Tensor | None) -> Tensor:
    slot = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    return torch.ones_like(draft_tokens, dtype=torch.bool) if lengths is None else slot < lengths[:, None]


def _prefix(accept: Tensor) -> Tensor:
    return accept.to(torch.int64).cumprod(1).sum(1)


def _verified(accepted: Tensor, next_token: Tensor, draft_tokens: Tensor) -> Verified:
    slot = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    padded = torch.nn.functional.pad(draft_tokens, (0, 1))
    return Verified(accepted, next_token, torch.where(slot < accepted[:, None], padded, next_token[:, None]))


@jit
def _greedy_kernel(
    target, draft, lengths, accepted_out, next_out, tokens_out, count, LENGTHS: tl.constexpr, DRAFTS: tl.constexpr
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, DRAFTS)
    limit = row * 0 + count
    if LENGTHS:
        limit = tl.minimum(limit, tl.load(lengths + row))
    here = lane < count
    own = tl.load(target + row * (count + 1) + lane, mask=lane <= count, other=0)
    drafted = tl.load(draft + row * count + lane, mask=here, other=0)
    failed = (own != drafted) | (lane >= limit) | (lane >= count)
    accepted = tl.min(tl.where(failed, lane, DRAFTS), axis=0)
    token = tl.sum(tl.where(lane == accepted, own, 0), axis=0)
    tl.store(accepted_out + row, accepted.to(tl.int64))
    tl.store(next_out + row, token)
    tl.store(tokens_out + row * (count + 1) + lane, tl.where(lane < accepted, drafted, token), mask=lane <= count)


@jit
def _accept_kernel(
    target,
    draft,
    probs,
    uniform,
    lengths,
    excess,
    weights_out,
    accepted_out,
    scale_out,
    count,
    vocab,
    splits,
    stride_batch,
    stride_slot,
    draft_batch,
    draft_slot,
    STAGE: tl.constexpr,
    PROBS: tl.constexpr,
    LENGTHS: tl.constexpr,
    DRAFTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program: one row. STAGE 0: chain. Block: 1 writes the weights P [B, n], 2 decides with the sums ``excess`` [B, n, splits]."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, DRAFTS)
    here = lane < count
    limit = row * 0 + count
    if LENGTHS:
        limit = tl.minimum(limit, tl.load(lengths + row))
    drafted = tl.load(draft + row * count + lane, mask=here, other=0)
    p = tl.load(target + row * stride_batch + lane.to(tl.int64) * stride_slot + drafted, mask=here, other=0.0)
    ratio = p
    if PROBS:
        q = tl.load(probs + row * draft_batch + lane.to(tl.int64) * draft_slot + drafted, mask=here, other=1.0)
        ratio = tl.where(q > 0, p / tl.where(q > 0, q, 1.0), (p > 0).to(tl.float32))
    number = tl.load(uniform + row * (count + 1) + lane, mask=here, other=1.0)
    if STAGE == 0:
        failed = (number >= ratio) | (lane >= limit) | (lane >= count)
        accepted = tl.min(tl.where(failed, lane, DRAFTS), axis=0)
        tl.store(accepted_out + row, tl.minimum(accepted.to(tl.int64), count))
        tl.store(scale_out + row, 1.0)
    if STAGE == 1:
        weight = row.to(tl.float32) * 0.0 + 1.0
        weights = tl.zeros_like(p)
        for i in range(count):
            weight = tl.minimum(weight * tl.sum(tl.where(lane == i, ratio, 0.0), axis=0), 1.0)
            weights = tl.where(lane == i, weight, weights)
        tl.store(weights_out + row * count + lane, weights, mask=here)
    if STAGE == 2:
        weights = tl.load(weights_out + row * count + lane, mask=here, other=1.0)
        behind = lane + 1 < count
        if PROBS:
            split = tl.arange(0, SPLITS)
            at = (row * count + lane[:, None]) * splits + split[None, :]
            parts = tl.load(excess + at, mask=behind[:, None] & (split[None, :] < splits), other=0.0)
            total = tl.sum(parts, axis=1)
        else:
            next_drafted = tl.load(draft + row * count + lane + 1, mask=behind, other=0)
            next_at = target + row * stride_batch + (lane.to(tl.int64) + 1) * stride_slot + next_drafted
            total = weights * (1.0 - tl.load(next_at, mask=behind, other=1.0))
        denominator = total + 1.0 - weights
        threshold = tl.where(denominator > 0, total / tl.where(denominator > 0, denominator, 1.0), 1.0)
        # A prefix that ends at the row's last draft has nothing behind it to win.
        threshold = tl.where(lane + 1 == limit, weights, threshold)
        passed = (number < threshold) & (lane < limit) & here
        accepted = tl.max(tl.where(passed, lane + 1, 0), axis=0)
        scale = tl.sum(tl.where(lane + 1 == accepted, weights, 0.0), axis=0)
        tl.store(accepted_out + row, accepted.to(tl.int64))
        tl.store(scale_out + row, tl.where(accepted == 0, 1.0, scale))


@jit
def _excess_kernel(
    target,
    probs,
    weights,
    excess,
    count,
    vocab,
    splits,
    stride_batch,
    stride_slot,
    draft_batch,
    draft_slot,
    TILE: tl.constexpr,
):
    """One program: one tile of S_i = sum_v max(P_i p_{i+1}(v) - q_{i+1}(v), 0) for prefix length i = slot + 1 < n."""
    pid = tl.program_id(0)
    split = pid % splits
    slot = (pid // splits) % (count - 1)
    row = (pid // splits // (count - 1)).to(tl.int64)
    weight = tl.load(weights + row * count + slot)
    ids = split * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    after = slot.to(tl.int64) + 1
    p = tl.load(target + row * stride_batch + after * stride_slot + ids, mask=inside, other=0.0)
    q = tl.load(probs + row * draft_batch + after * draft_slot + ids, mask=inside, other=0.0)
    tl.store(excess + (row * count + slot) * splits + split, tl.sum(tl.maximum(weight * p - q, 0.0), axis=0))


@jit
def _residual_of(
    target,
    probs,
    draft,
    row,
    accepted,
    scale,
    tested,
    ids,
    inside,
    stride_batch,
    stride_slot,
    draft_batch,
    draft_slot,
    count,
    PROBS: tl.constexpr,
):
    """p and max(scale p - q, 0) of slot ``accepted`` at ``ids``; the second is p where no draft was tested there."""
    p = tl.load(target + row * stride_batch + accepted * stride_slot + ids, mask=inside, other=0.0)
    live = inside & (ids * 0 + tested > 0)
    if PROBS:
        q = tl.load(probs + row * draft_batch + accepted * draft_slot + ids, mask=live, other=0.0)
        rest = tl.maximum(scale * p - q, 0.0)
    else:
        rejected = tl.load(draft + row * count + ids * 0 + accepted, mask=live, other=-1)
        rest = tl.where(ids == rejected, 0.0, scale * p)
    return p, tl.where(live, rest, p)


@jit
def _residual_kernel(
    target,
    probs,
    draft,
    lengths,
    accepted_in,
    scale_in,
    sums,
    count,
    vocab,
    splits,
    total,
    stride_batch,
    stride_slot,
    draft_batch,
    draft_slot,
    PROBS: tl.constexpr,
    LENGTHS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: one tile of one row. sums [2, B * splits]: mass of p, mass of the residual."""
    pid = tl.program_id(0)
    row = (pid // splits).to(tl.int64)
    limit = row * 0 + count
    if LENGTHS:
        limit = tl.minimum(limit, tl.load(lengths + row))
    accepted = tl.load(accepted_in + row)
    ids = (pid % splits) * TILE + tl.arange(0, TILE)
    tested = (accepted < limit).to(tl.int32)
    p, rest = _residual_of(
        target, probs, draft, row, accepted, tl.load(scale_in + row), tested, ids, ids < vocab,
        stride_batch, stride_slot, draft_batch, draft_slot, count, PROBS,
    )  # fmt: skip
    tl.store(sums + pid, tl.sum(p, axis=0))
    tl.store(sums + total + pid, tl.sum(rest, axis=0))


@jit
def _draw_kernel(
    target,
    probs,
    draft,
    uniform,
    lengths,
    accepted_in,
    scale_in,
    sums,
    next_out,
    tokens_out,
    count,
    vocab,
    splits,
    total,
    stride_batch,
    stride_slot,
    draft_batch,
    draft_slot,
    PROBS: tl.constexpr,
    LENGTHS: tl.constexpr,
    DRAFTS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: one row. Draws from the residual (from p where it has no mass) and writes the row's tokens."""
    row = tl.program_id(0).to(tl.int64)
    limit = row * 0 + count
    if LENGTHS:
        limit = tl.minimum(limit, tl.load(lengths + row))
    accepted = tl.load(accepted_in + row)
    tested = (accepted < limit).to(tl.int32)
    split = tl.arange(0, SPLITS)
    here = split < splits
    of_p = tl.load(sums + row * splits + split, mask=here, other=0.0)
    of_rest = tl.load(sums + total + row * splits + split, mask=here, other=0.0)
    use_rest = (tl.sum(of_rest, axis=0) > 0).to(tl.int32)
    part = tl.where(split * 0 + use_rest > 0, of_rest, of_p)
    goal = tl.load(uniform + row * (count + 1) + count) * tl.sum(part, axis=0)
    # Sums of a scan need not be monotone to the last bit: the first split with mass that passes the goal.
    passing = (tl.cumsum(part, axis=0) > goal) & (part > 0)
    last = tl.max(tl.where(part > 0, split, 0), axis=0)
    chosen = tl.minimum(tl.min(tl.where(passing, split, SPLITS), axis=0), last)
    before = tl.sum(tl.where(split < chosen, part, 0.0), axis=0)
    ids = chosen * TILE + tl.arange(0, TILE)
    p, rest = _residual_of(
        target, probs, draft, row, accepted, tl.load(scale_in + row), tested, ids, ids < vocab,
        stride_batch, stride_slot, draft_batch, draft_slot, count, PROBS,
    )  # fmt: skip
    mass = tl.where(ids * 0 + use_rest > 0, rest, p)
    passed = (tl.cumsum(mass, axis=0) + before > goal) & (mass > 0)
    last_id = tl.max(tl.where(mass > 0, ids, 0), axis=0)
    first_id = tl.min(tl.where(passed, ids, 2147483647), axis=0)
    # Rounding may leave the split's sum short of the goal: then its last id with mass.
    token = tl.where(first_id == 2147483647, last_id, first_id).to(tl.int64)
    tl.store(next_out + row, token)
    lane = tl.arange(0, DRAFTS)
    drafted = tl.load(draft + row * count + lane, mask=lane < count, other=0)
    tl.store(tokens_out + row * (count + 1) + lane, tl.where(lane < accepted, drafted, token), mask=lane <= count)


def _empty(draft_tokens: Tensor) -> Verified:
    batch, count = draft_tokens.shape
    new = draft_tokens.new_empty
    return Verified(new(batch), new(batch), new(batch, count + 1))


def verify_greedy_triton(target_tokens: Tensor, draft_tokens: Tensor, lengths: Tensor | None = None) -> Verified:
    """Launch the kernel; arguments and result as ``verify_greedy``."""
    require_launchable(draft_tokens, "draft_tokens")
    batch, count = draft_tokens.shape
    out = _empty(draft_tokens)
    if batch:
        _greedy_kernel[(batch,)](
            target_tokens.contiguous(), draft_tokens.contiguous(), out.accepted if lengths is None else lengths.contiguous(), *out, count,
            LENGTHS=lengths is not None, DRAFTS=max(16, next_power_of_2(count + 1)), num_warps=1,
        )  # fmt: skip
    return out


def verify_sampled_triton(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    uniform: Tensor,
    lengths: Tensor | None = None,
    block: bool = False,
) -> Verified:
    """Launch the kernels; arguments and result as ``verify_sampled``."""
    require_launchable(target_probs, "target_probs")
    (batch, count), vocab, device = draft_tokens.shape, target_probs.shape[-1], target_probs.device
    out = _empty(draft_tokens)
    if not batch:
        return out
    target = target_probs if target_probs.stride(-1) == 1 else target_probs.contiguous()
    probs = target if draft_probs is None else draft_probs if draft_probs.stride(-1) == 1 else draft_probs.contiguous()
    draft, number = draft_tokens.contiguous(), uniform.contiguous()
    limits = out.accepted if lengths is None else lengths.contiguous()
    tile = _TILE
    splits = ceil_div(vocab, tile)
    # More programs than the device takes at once gain nothing; wide rows then go in larger tiles.
    while tile < 8192 and batch * splits > 8 * multiprocessors(device):
        tile, splits = tile * 2, ceil_div(vocab, tile * 2)
    strides = (
        target.stride(0),
        target.stride(1),
        *((0, 0) if draft_probs is None else (probs.stride(0), probs.stride(1))),
    )
    flags = dict(PROBS=draft_probs is not None, LENGTHS=lengths is not None)
    lanes = dict(DRAFTS=max(16, next_power_of_2(count + 1)), SPLITS=next_power_of_2(splits))
    scale = torch.empty(batch, dtype=torch.float32, device=device)
    sums = torch.empty(2, batch * splits, dtype=torch.float32, device=device)
    weights, excess = scale, scale
    if block:
        weights = torch.empty(batch, max(count, 1), dtype=torch.float32, device=device)
        if draft_probs is not None:
            excess = torch.empty(batch, max(count, 1), splits, dtype=torch.float32, device=device)
    for stage in (1, 2) if block else (0,):
        _accept_kernel[(batch,)](
            target, draft, probs, number, limits, excess, weights, out.accepted, scale, count, vocab, splits, *strides,
            STAGE=stage, **flags, **lanes, num_warps=4 if stage == 2 else 1,
        )  # fmt: skip
        if stage == 1 and draft_probs is not None and count > 1:
            _excess_kernel[(batch * (count - 1) * splits,)](
                target, probs, weights, excess, count, vocab, splits, *strides, TILE=tile, num_warps=4
            )
    _residual_kernel[(batch * splits,)](
        target, probs, draft, limits, out.accepted, scale, sums, count, vocab, splits, batch * splits, *strides,
        **flags, TILE=tile, num_warps=4,
    )  # fmt: skip
    _draw_kernel[(batch,)](
        target, probs, draft, number, limits, out.accepted, scale, sums, out.next_token, out.tokens,
        count, vocab, splits, batch * splits, *strides, **flags, **lanes, TILE=tile, num_warps=4,
    )  # fmt: skip
    return out


def verify_greedy(target_tokens: Tensor, draft_tokens: Tensor, lengths: Tensor | None = None) -> Verified:
    """Accepted prefix and next token at temperature 0: target_tokens [B, n + 1] (the target's arg-max), draft_tokens [B, n].

    Arguments and result: ``verify_greedy_reference``, which runs on the CPU. Raises ValueError for shapes or types that do not fit.
    """
    _check_drafts(draft_tokens, lengths)
    batch, count = draft_tokens.shape
    if target_tokens.shape != (batch, count + 1) or target_tokens.dtype != torch.int64:
        raise ValueError(
            f"target_tokens must be int64 [{batch}, {count + 1}]: got {target_tokens.dtype} {tuple(target_tokens.shape)}"
        )
    function = verify_greedy_triton if count < MAX_DRAFTS and use_triton(draft_tokens) else verify_greedy_reference
    return function(target_tokens, draft_tokens, lengths)


def verify_sampled(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    uniform: Tensor,
    lengths: Tensor | None = None,
    block: bool = False,
) -> Verified:
    """Rejection sampling of a draft (block: block verification) and the token after it, distributed exactly as the target's own.

    Arguments and result: ``verify_sampled_reference``, which runs on the CPU. The kernel sums in fp32: the next token is the same
    unless the last number lies within 1e-5 of a border of the cumulative residual. Raises ValueError for shapes or types that do not
    fit.
    """
    _check_drafts(draft_tokens, lengths)
    batch, count = draft_tokens.shape
    if target_probs.dim() != 3 or target_probs.shape[:2] != (batch, count + 1):
        raise ValueError(f"target_probs must be [{batch}, {count + 1}, V]: got {tuple(target_probs.shape)}")
    vocab = target_probs.shape[-1]
    if draft_probs is not None and draft_probs.shape != (batch, count, vocab):
        raise ValueError(f"draft_probs must be [{batch}, {count}, {vocab}] or None: got {tuple(draft_probs.shape)}")
    if uniform.shape != (batch, count + 1):
        raise ValueError(f"uniform must be [{batch}, {count + 1}]: got {tuple(uniform.shape)}")
    floats = {x.dtype for x in (target_probs, draft_probs, uniform) if x is not None}
    fits = floats == {torch.float32} and count < MAX_DRAFTS
    function = verify_sampled_triton if fits and use_triton(target_probs) else verify_sampled_reference
    return function(target_probs, draft_tokens, draft_probs, uniform, lengths, block)


def _check_drafts(draft_tokens: Tensor, lengths: Tensor | None) -> None:
    if draft_tokens.dim() != 2 or draft_tokens.dtype != torch.int64:
        raise ValueError(f"draft_tokens must be int64 [B, n]: got {draft_tokens.dtype} {tuple(draft_tokens.shape)}")
    if lengths is not None and (lengths.shape != draft_tokens.shape[:1] or lengths.dtype != torch.int64):
        raise ValueError(
            f"lengths must be int64 [B = {draft_tokens.shape[0]}]: got {lengths.dtype} {tuple(lengths.shape)}"
        )
