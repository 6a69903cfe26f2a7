"""The training forward: packed rows through a decoder, by SDPA with a dense mask or by FlexAttention with the same rule, and the loss.

Layers are compiled one by one (they share one graph), so that compilation takes seconds, not minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from dllm.model.decoder import Decoder
from dllm.training.layout import KIND_NAMES, sees, training_mask
from dllm.training.packing import Batch

logger = logging.getLogger(__name__)

Kernel = Literal["sdpa", "flex"]
SURE = 0.9
"""A slot counts as sure if its top probability is above this."""


def dense_layer(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
    """One layer over x [B, R, E] with an additive mask [B, 1, R, R]."""
    attention: Any = layer.attention
    q, k, v = attention.project(layer.attention_norm(x), cos, sin)  # type: ignore[operator]
    repeats = attention.heads // attention.kv_heads
    # Repeated key heads let the mask be broadcast over heads instead of being repeated with the queries.
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    x = x + attention.out(rearrange(mixed, "b h r d -> b r (h d)"))
    return x + layer.mlp(layer.mlp_norm(x))  # type: ignore[operator]


def flex_layer(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask) -> Tensor:
    """One layer over x [B, R, E] that skips the tiles in which nobody sees anybody."""
    attention: Any = layer.attention
    q, k, v = attention.project(layer.attention_norm(x), cos, sin)  # type: ignore[operator]
    mixed = flex_attention(q, k, v, block_mask=mask, enable_gqa=attention.heads != attention.kv_heads)
    x = x + attention.out(rearrange(mixed, "b h r d -> b r (h d)"))  # type: ignore[arg-type]
    return x + layer.mlp(layer.mlp_norm(x))  # type: ignore[operator]


class TrainingForward:
    """Hidden states of a batch; kernel and compilation are fixed at construction."""

    def __init__(self, model: Decoder, kernel: Kernel, compiled: bool) -> None:
        self.model, self.kernel = model, kernel
        plain: Callable[..., Tensor] = dense_layer if kernel == "sdpa" else flex_layer
        self.layer = torch.compile(plain, dynamic=False) if compiled else plain

    def mask(self, batch: Batch) -> Any:
        """The rule for this batch, in the form that the kernel takes."""
        document, copy, group, low = batch.document, batch.copy, batch.group, batch.low
        if self.kernel == "sdpa":
            seen = training_mask(document, copy, group, low)
            bias = torch.zeros(seen.shape, dtype=self.model.dtype, device=seen.device)
            return bias.masked_fill_(~seen, float("-inf"))[:, None]

        def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return sees(
                (document[b, q], document[b, k]), (copy[b, q], copy[b, k]), (group[b, q], group[b, k]), low[b, q]
            )

        rows = document.shape[1]
        return create_block_mask(rule, document.shape[0], None, rows, rows, device=document.device)

    def hidden(self, batch: Batch) -> Tensor:
        """Batch on the model's device -> hidden states after the final norm [B, R, E]."""
        mask = self.mask(batch)
        x = self.model.embed(batch.ids, batch.masked)
        cos, sin = self.model.rotary(batch.position)
        for layer in self.model.layers:
            x = self.layer(layer, x, cos, sin, mask)
        return self.model.norm(x)


def slot_loss(
    model: Decoder, hidden: Tensor, batch: Batch, chunk: int = 8192, certainty_weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy of the slots (fp32 scalar, nats), and sums by kind, fp32 [kinds, 4].

    certainty_weight > 0 adds that much of the law's entropy where the top token is right: such slots may then be committed together (Chen
    et al. 2025, dParallel, arXiv:2509.26488). It buys speed with calibration: a wrong slot's law is left alone.
    The four sums: slots, cross-entropy, right top tokens, slots whose top probability is above 0.9. The head runs over trained slots
    only, ``chunk`` at a time, and is computed again in the backward pass where there are several chunks.
    """
    rows = hidden.flatten(0, 1).index_select(0, batch.slot_row)
    total = torch.zeros((), device=hidden.device)
    sums = torch.zeros(len(KIND_NAMES), 4, device=hidden.device)
    pieces = range(0, len(rows), chunk)
    for at in pieces:
        part = slice(at, at + chunk)
        arguments = (model, rows[part], batch.slot_token[part], certainty_weight)
        if torch.is_grad_enabled() and len(pieces) > 1:
            loss, entropy, right, sure = checkpoint(_slot_terms, *arguments, use_reentrant=False)
        else:
            loss, entropy, right, sure = _slot_terms(*arguments)
        weight = batch.slot_weight[part]
        total = total + (loss * weight).sum()
        counted = (weight > 0).float()
        terms = torch.stack([counted, entropy * counted, right * counted, sure * counted], dim=-1)
        sums.index_add_(0, batch.slot_kind[part], terms)
    return total / batch.slot_weight.sum().clamp(min=1e-6), sums


def _slot_terms(
    model: Decoder, rows: Tensor, token: Tensor, certainty_weight: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = model.head(rows).float()
    loss = F.cross_entropy(logits, token, reduction="none")
    with torch.no_grad():
        entropy = loss.detach()
        top, best = logits.max(dim=-1)
        right = (best == token).float()
        sure = ((top - logits.logsumexp(dim=-1)).exp() > SURE).float()
    if certainty_weight > 0:
        logs = logits.log_softmax(dim=-1)
        loss = loss - certainty_weight * right * (logs.exp() * logs).sum(dim=-1)
    return loss, entropy, right, sure


def choose_kernel(model: Decoder, batch: Batch, compiled: bool, steps: int = 6) -> TrainingForward:
    """Time forward and backward of both kernels on ``batch`` and return the faster one; off CUDA it is SDPA without a trial."""
    if model.device.type != "cuda":
        return TrainingForward(model, "sdpa", compiled)
    best: tuple[float, TrainingForward] | None = None
    kernels: tuple[Kernel, ...] = ("flex", "sdpa")
    for kernel in kernels:
        candidate = TrainingForward(model, kernel, compiled)
        try:
            seconds = _time_steps(candidate, batch, steps)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            # A kernel that this PyTorch cannot compile is not chosen; if none works the error is raised.
            if best is None and kernel == kernels[-1]:
                raise
            logger.info("attention kernel %s is off: %s", kernel, str(error).splitlines()[0])
            continue
        logger.info("attention kernel %s: %.1f ms for forward and backward", kernel, seconds * 1e3)
        if best is None or seconds < best[0]:
            best = (seconds, candidate)
    assert best is not None, "the last kernel either ran or raised"
    logger.info("attention kernel chosen: %s", best[1].kernel)
    return best[1]


def _time_steps(forward: TrainingForward, batch: Batch, steps: int) -> float:
    """Median seconds of forward and backward, the first two (compilation) left out."""
    times = []
    for _ in range(steps + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss, _ = slot_loss(forward.model, forward.hidden(batch), batch)
        loss.backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        forward.model.zero_grad(set_to_none=True)
    return sorted(times[2:])[steps // 2]
