"""Small dataclasses and protocols that every room shares; imports nothing of ours.

Letters: B batch, L canvas (given tokens and generation, in text order), S slots of a block, Q new rows of one forward, N stored keys,
V vocabulary, D width. A *row* is a position that the model computes; a *slot* is a position whose token is chosen. In a shifted model the
law of slot ``i`` stands in row ``i - 1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

LOWEST_GROUP = -(2**30)
"""``low`` of a row that may look at every earlier group."""
PADDING_GROUP = 2**30
"""Group of a key that nobody sees: padding, rows not stored, rows that are being recomputed."""

AttentionKind = Literal["bidirectional", "block_causal", "causal"]


_SPEC_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "logits_shift": (0, 1),
    "attention": ("bidirectional", "block_causal", "causal"),
    "first_slot": ("free", "commit_first", "commit_full_pass", "commit_store_pass"),
    "confidence": ("raw", "processed"),
    "block_origin": ("prompt", "zero"),
    "infill": ("rank", "canvas"),
}


@dataclass(frozen=True)
class DecodeSpec:
    """What a decoder must know about a diffusion LM beside its weights.

    mask_token_id: id that stands for [MASK] at the input; None where the model has none (uniform corruption).
    logits_shift: 1 if the logits of row i - 1 belong to slot i, else 0.
    first_slot: where a block's first token comes from in a shifted model. "free": like any other slot. "commit_first": its law stands in
        the last row of the block before, never sees the open block and so never changes: it is committed in the block's first step,
        and every later choice sees it. "commit_full_pass", "commit_store_pass": committed alone, from that pass.
    block_origin: "prompt" counts blocks from the end of the given tokens, "zero" from position 0 (the first block then holds the
        prompt's tail).
    confidence: "raw" = probability under the unprocessed law; "processed" = after temperature, top-k, top-p.
    infill: "rank" = suffix before the gap in visibility, seeing only itself; "canvas" = everything sees everything.
    filler_token_id: token that closes a gap of unknown length inside a longer window; None if the model was not trained with one.
    document_start_id: token that stands before a text without a prefix; None where the model needs or knows none.
    expand_token_id, delete_token_id: tokens that double or remove a mask (DreamOn), or None.
    """

    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    logits_shift: Literal[0, 1]
    attention: AttentionKind
    block_length: int
    max_positions: int
    vocab_size: int
    first_slot: Literal["free", "commit_first", "commit_full_pass", "commit_store_pass"] = "free"
    confidence: Literal["raw", "processed"] = "raw"
    block_origin: Literal["prompt", "zero"] = "zero"
    infill: Literal["rank", "canvas"] = "canvas"
    filler_token_id: int | None = None
    document_start_id: int | None = None
    expand_token_id: int | None = None
    delete_token_id: int | None = None
    default_sampler: str = "threshold"
    default_threshold: float = 0.9
    default_cache: str = "none"

    def __post_init__(self) -> None:
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id must be in [0, {self.vocab_size}): got {self.mask_token_id}")
        if self.block_length < 1:
            raise ValueError(f"block_length must be >= 1: got {self.block_length}")
        for name, accepted in _SPEC_CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {accepted}: got {getattr(self, name)!r}")


def pack_bits(mask: Tensor) -> Tensor:
    """mask [B, Q, Q] bool -> int64 [B, Q, ceil(Q / 64)]; bit j % 64 of word j // 64 says whether row i sees new row j."""
    batch, queries, keys = mask.shape
    words = -(-keys // 64)
    padded = torch.nn.functional.pad(mask, (0, words * 64 - keys)).view(batch, queries, words, 64).to(torch.int64)
    shift = torch.arange(64, device=mask.device, dtype=torch.int64)
    return (padded << shift).sum(-1)


def unpack_bits(bits: Tensor, keys: int) -> Tensor:
    """Inverse of ``pack_bits``: int64 [B, Q, W] -> bool [B, Q, keys]."""
    shift = torch.arange(64, device=bits.device, dtype=torch.int64)
    return ((bits[..., None] >> shift) & 1).bool().flatten(-2)[..., :keys]


@dataclass(frozen=True, eq=False)
class Attend:
    """Who may look at whom, as two pieces of data.

    Rule 1, new rows against stored keys: ``low[q] <= key_group[n] <= group[q]`` (all int32), and with a window also
    ``position[q] - key_position[n] < window``. Rule 2, among the new rows: a packed bit matrix.

    key_group [B, N]; low, group [B, Q]; bits [B, Q, ceil(Q / 64)] int64; window in positions, or None.
    """

    key_group: Tensor
    low: Tensor
    group: Tensor
    bits: Tensor
    window: int | None = None
    key_position: Tensor | None = None
    position: Tensor | None = None

    @property
    def num_queries(self) -> int:
        return self.group.shape[1]

    @cached_property
    def stored_mask(self) -> Tensor:
        """Rule 1 as bool [B, Q, N]."""
        key = self.key_group[:, None, :]
        seen = (key >= self.low[..., None]) & (key <= self.group[..., None]) & (key < PADDING_GROUP)
        if self.window is not None:
            assert self.key_position is not None and self.position is not None, (
                "a window needs key_position and position"
            )
            seen = seen & (self.position[..., None] - self.key_position[:, None, :] < self.window)
        return seen

    @cached_property
    def new_mask(self) -> Tensor:
        """Rule 2 as bool [B, Q, Q]."""
        return unpack_bits(self.bits, self.num_queries)

    def mask(self) -> Tensor:
        """The truth: bool [B, Q, N + Q], stored keys first, True = may look."""
        return torch.cat([self.stored_mask, self.new_mask], dim=-1)

    @classmethod
    def by_group(
        cls, group: Tensor, low: Tensor | None = None, valid: Tensor | None = None, key_group: Tensor | None = None
    ) -> Attend:
        """The same group rule among the new rows as against the stored keys.

        group, low [B, Q] integers (low None: everything below); valid [B, Q] bool (False: padding, seen by nobody but itself);
        key_group [B, N] (None: nothing stored). Constant group = bidirectional, index = causal, i // S = block-causal.
        """
        group = group.to(torch.int32)
        low = torch.full_like(group, LOWEST_GROUP) if low is None else low.to(torch.int32)
        if key_group is None:
            key_group = group.new_empty(group.shape[0], 0)
        key = group if valid is None else torch.where(valid, group, torch.full_like(group, PADDING_GROUP))
        seen = (
            (key[:, None, :] >= low[..., None])
            & (key[:, None, :] <= group[..., None])
            & (key[:, None, :] < PADDING_GROUP)
        )
        # A padded query row sees itself, so that its softmax stays finite; nobody reads the result.
        seen = seen | torch.eye(group.shape[1], dtype=torch.bool, device=group.device)
        built = cls(key_group.to(torch.int32), low, group, pack_bits(seen))
        built.__dict__["new_mask"] = seen
        return built

    @classmethod
    def bidirectional(cls, valid: Tensor, key_group: Tensor | None = None) -> Attend:
        """valid [B, Q] bool: every valid row sees every valid row (and every stored key of group 0)."""
        return cls.by_group(torch.zeros_like(valid, dtype=torch.int32), None, valid, key_group)

    @classmethod
    def causal(cls, positions: Tensor, valid: Tensor | None = None, key_group: Tensor | None = None) -> Attend:
        """positions [B, Q]: a row sees keys at its own and earlier positions."""
        return cls.by_group(positions, None, valid, key_group)

    @classmethod
    def block_causal(
        cls, positions: Tensor, block_length: int, valid: Tensor | None = None, key_group: Tensor | None = None
    ) -> Attend:
        """positions [B, Q]: a row sees its own block of ``block_length`` and every earlier one."""
        return cls.by_group(torch.div(positions, block_length, rounding_mode="floor"), None, valid, key_group)


@dataclass(frozen=True, eq=False)
class RowStats:
    """Statistics of the law of each slot, aligned to the canvas; a field that nobody needs is None.

    token [B, S] int64, the proposed token (arg-max, or the sampled one); confidence [B, S] fp32, its probability; entropy in nats;
    margin = best minus second-best probability; logits, previous [B, S, V] fp32 = this law and the one of the step before in the same
    block (zeros, the uniform law, in a block's first step); log_total [B, S] fp32 = logsumexp of the raw logits, finite exactly
    where they are a law.
    """

    token: Tensor
    confidence: Tensor
    entropy: Tensor | None = None
    margin: Tensor | None = None
    logits: Tensor | None = None
    previous: Tensor | None = None
    log_total: Tensor | None = None


@dataclass(eq=False)
class RowState:
    """What a sampler may know of each row; owned by the loop.

    step [B] int64: denoise steps done in this block; steps [B] int64: steps allowed per block (2**30 when unlimited); masks_at_start [B]
    int64: masks when the block was opened; slots [B, S] int64: canvas positions of the slots; history: a free dict, kept across the
    steps of the call, for samplers that need more than the present. block_start, block_length [B] int64: first row of the open block
    and its rows, given tokens included (None: the same as its slots). post_steps [B] int64: for revisers, steps of the block that
    began without a mask, the present one included. banned [V] or [B, S, V] bool: ids that may not be committed.
    """

    step: Tensor
    steps: Tensor
    masks_at_start: Tensor
    slots: Tensor
    history: dict[str, Tensor] = field(default_factory=dict)
    block_start: Tensor | None = None
    block_length: Tensor | None = None
    post_steps: Tensor | None = None
    banned: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """A sampler's decision: tokens [B, S] int64, transfer_index [B, S] bool (True = commit now).

    For uniform corruption also: canvas [B, S] int64, what stands in the slots that stay open; conditioning [B, S, V], the laws that
    the next step is conditioned on.
    """

    tokens: Tensor
    transfer_index: Tensor
    canvas: Tensor | None = None
    conditioning: Tensor | None = None


@runtime_checkable
class Noise(Protocol):
    """Uniform numbers keyed by (row seed, position, step); never a stateful generator.

    For a batch it also has ``select(keep [B'] int64) -> Noise``, the noise of some of its rows.
    """

    def uniform(self, positions: Tensor, step: Tensor, stream: int = 0) -> Tensor:
        """positions [B, S] int64, step [B] int64 -> fp32 [B, S] in (0, 1)."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """Which masked slots are committed in this step. Owns no loop, never calls the model, keeps no hidden state."""

    needs: frozenset[str]

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step: ...


@runtime_checkable
class Reviser(Protocol):
    """What is changed among the committed slots of the open block: edits, or a return to the mask."""

    needs: frozenset[str]

    def revise(self, rows: RowStats, canvas: Tensor, committed: Tensor, state: RowState, noise: Noise) -> Revision: ...


@dataclass(frozen=True, eq=False)
class Revision:
    """tokens [B, S] int64; edit [B, S] bool: replace by ``tokens``; remask [B, S] bool: becomes a mask again; settled [B] bool."""

    tokens: Tensor
    edit: Tensor
    remask: Tensor
    settled: Tensor


@dataclass(eq=False)
class DenoiseState:
    """Where every row of the batch stands; owned by the loop, read by caches and policies. Integer tensors are int64 on the device.

    canvas, masked, valid, group, low, position, stored: [B, L]; all others [B].
    lo, hi: slots of the open block; row_lo: first row of its attention group (row_lo < lo where given tokens belong to the block);
    prev_lo: first row of the finished block that is not yet stored, or row_lo if there is none; begin, end: first slot of the first and
    one past the last slot of the last region; step: steps done in the block; forwards: forwards done; active: still decoding.
    Host values: first_forward: nothing has run yet; row_bucket: rows that hold any two neighbouring blocks of the call.
    """

    canvas: Tensor
    masked: Tensor
    valid: Tensor
    group: Tensor
    low: Tensor
    position: Tensor
    stored: Tensor
    lo: Tensor
    hi: Tensor
    row_lo: Tensor
    prev_lo: Tensor
    begin: Tensor
    end: Tensor
    step: Tensor
    block: Tensor
    forwards: Tensor
    active: Tensor
    spec: DecodeSpec
    first_forward: bool = True
    row_bucket: int = 0

    @property
    def shift(self) -> int:
        return self.spec.logits_shift


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows of one forward. rows [B, Q] int64 canvas positions; valid, write [B, Q] bool (computed; kept in the store);

    decode [B] bool: the laws of this forward are used for a denoise step (False: prefill); keys [B, L] bool: stored rows that may be
    read, or None for all that are stored and not recomputed; first_only [B] bool or None: rows whose step commits the first slot of
    the open block and nothing else. Shapes come from few buckets, so Q may exceed what any row needs.
    """

    rows: Tensor
    valid: Tensor
    write: Tensor
    decode: Tensor
    keys: Tensor | None = None
    first_only: Tensor | None = None

    @classmethod
    def of_ranges(
        cls,
        start: Tensor,
        stop: Tensor,
        bucket: int,
        decode: Tensor,
        write: Tensor | None = None,
        first_only: Tensor | None = None,
    ) -> Plan:
        """Rows start[b] .. stop[b] - 1 (at most ``bucket`` of them); write [B, bucket] bool or None: write every valid row."""
        rows = start[:, None] + torch.arange(bucket, device=start.device)
        valid = rows < stop[:, None]
        write = valid if write is None else write & valid
        return cls(rows.clamp(min=0), valid, write, decode, first_only=first_only)

    @classmethod
    def of_mask(cls, compute: Tensor, decode: Tensor, write: Tensor | None = None) -> Plan:
        """Rows where compute [B, L]; write [B, L] bool or None: write every computed row."""
        rows = torch.sort((~compute).to(torch.int8), dim=1, stable=True).indices
        valid = compute.gather(1, rows)
        return cls(rows, valid, valid if write is None else write.gather(1, rows) & valid, decode)


class Cache(Protocol):
    """Which rows are recomputed and which stay frozen; decides rows, not arithmetic."""

    uses_store: bool

    def check(self, spec: DecodeSpec) -> None:
        """Raise ValueError if the cache has no meaning for this model."""
        ...

    def plan(self, state: DenoiseState) -> Plan: ...


@dataclass(frozen=True, eq=False)
class PolicyState:
    """What a block policy may look at: nothing of the tokens whose fate it decides (notes: non-anticipating).

    position [B], remaining [B] int64: first slot of the coming block and slots left; confidence: of the block before, [B, S] or None;
    hidden [B, D] and top_logits [B, k]: last row of the prefill, or None; default: the model's own block length; total [B] int64: slots
    of the whole gap, or None; delimiter_confidence [B, W] fp32: for a ``ForesightPolicy``, of the coming W slots, the probability of each
    arg-max that is one of its delimiters, 0 at the others.
    """

    position: Tensor
    remaining: Tensor
    default: int
    confidence: Tensor | None = None
    hidden: Tensor | None = None
    top_logits: Tensor | None = None
    total: Tensor | None = None
    delimiter_confidence: Tensor | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class BlockPolicy(Protocol):
    """Length of the next block; one type for denoising blocks and for draft lengths.

    A policy may also have ``check(spec)``, which raises ValueError for a diffusion model that it has no meaning for.
    """

    def next(self, state: PolicyState) -> int: ...


@runtime_checkable
class ForesightPolicy(Protocol):
    """A block policy of a bidirectional model that wants to know where the block's first forward expects a delimiter."""

    delimiter_ids: tuple[int, ...]

    def window(self, total: int, remaining: int) -> int:
        """How many of the coming ``remaining`` slots of a gap of ``total`` slots to look at."""
        ...

    def next(self, state: PolicyState) -> int: ...


@dataclass(frozen=True, eq=False)
class Draft:
    """A drafter's proposal: tokens [B, n] int64; probs [B, n, V] fp32 (None: deterministic); confidence [B, n] fp32 or None."""

    tokens: Tensor
    probs: Tensor | None = None
    confidence: Tensor | None = None
