"""Counter-based random numbers keyed (seed, position, step): the same on CPU and GPU, in torch and in Triton.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the row's 64-bit seed as key and the counter
(position, step, stream, lane). It is the generator behind ``tl.philox``, so a kernel can draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

STREAM_TOKEN = 0
"""Uniforms that choose tokens."""
STREAM_POSITION = 1
"""Uniforms that choose positions (random orders)."""
STREAM_ACCEPT = 2
"""Uniforms of acceptance tests."""
STREAM_RESIDUAL = 3
"""Uniforms that draw from residual laws."""
STREAM_CANVAS = 4
"""Uniforms that put random tokens into open slots (uniform corruption)."""
STREAM_BORDER = 5
"""Uniforms that choose the tokens of white space before a gap."""


def _mul32(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product; int64 arithmetic wraps, so masking after the shift gives the true bits."""
    product = a * b
    return (product >> 32) & _MASK32, product & _MASK32


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10. All int64 tensors that broadcast; counters are taken modulo 2**32 -> four int64 tensors in [0, 2**32)."""
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    c0, c1, c2, c3 = (c & _MASK32 for c in torch.broadcast_tensors(c0, c1, c2, c3))
    for _ in range(_ROUNDS):
        high0, low0 = _mul32(c0, _MULTIPLIER[0])
        high1, low1 = _mul32(c2, _MULTIPLIER[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def to_uniform(bits: Tensor) -> Tensor:
    """32 random bits (int64) -> fp32 in (0, 1): the middle of one of 2**23 equal cells, so neither 0 nor 1 occurs."""
    # 24 bits plus a half would round up to 1.0 in fp32; 23 bits plus a half are exact.
    return ((bits >> 9).to(torch.float32) + 0.5) * (1.0 / (1 << 23))


@dataclass(frozen=True)
class CounterNoise:
    """Uniform numbers for a batch: row b has seed ``seeds[b]``. A number depends on nothing but (seed, position, step, stream, lane)."""

    seeds: Tensor

    @classmethod
    def for_rows(cls, seed: int | Sequence[int] | None, batch: int, device: torch.device | str = "cpu") -> CounterNoise:
        """An int s gives row i the seed s + i; a sequence gives one seed a row; None draws one from the system."""
        if seed is None:
            seed = int(torch.randint(0, 2**62, ()).item())
        if isinstance(seed, int) and not isinstance(seed, bool):
            seeds = [seed + i for i in range(batch)]
        elif isinstance(seed, Sequence) and not isinstance(seed, str):
            seeds = list(seed)
            if len(seeds) != batch:
                raise ValueError(f"seed must be an int or one int a row ({batch}): got {len(seeds)} values")
        else:
            raise TypeError(f"seed must be an int or one int a row: got {seed!r}")
        if any(isinstance(s, bool) or not isinstance(s, int) for s in seeds):
            raise TypeError(f"seed must be an int or one int a row: got {seed!r}")
        if any(not -(2**63) <= s < 2**63 for s in seeds):
            raise ValueError(f"seed must fit in 64 bits: got {seed}")
        return cls(torch.tensor(seeds, dtype=torch.int64, device=device))

    def select(self, keep: Tensor) -> CounterNoise:
        """The noise of the rows keep [B'] int64."""
        return CounterNoise(self.seeds[keep])

    def uniform(self, positions: Tensor, step: Tensor, stream: int = 0) -> Tensor:
        """positions [B, S] int64, step [B] int64 -> fp32 [B, S] in (0, 1)."""
        zero = torch.zeros_like(positions)
        bits, *_ = philox(self.seeds[:, None], positions, step[:, None].expand_as(positions), zero + stream, zero)
        return to_uniform(bits)

    def uniform_lanes(self, positions: Tensor, step: Tensor, lanes: int, stream: int = 0) -> Tensor:
        """One number per lane (say, per vocabulary entry): fp32 [B, S, lanes] in (0, 1); lane l shares no number with another."""
        lane = torch.arange(lanes, device=positions.device)
        base = torch.zeros_like(lane)
        bits, *_ = philox(
            self.seeds[:, None, None], positions[..., None] + base, step[:, None, None] + base, base + stream, lane + 1
        )
        return to_uniform(bits)
