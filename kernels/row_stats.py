"""Statistics of a row's law in one read: top token, probability, entropy, margin, sampled token.

Formula, for logits l and banned ids excluded from the choice: token = argmax l (ties to the lowest id), confidence =
exp(l[token] - logsumexp(l)) under the raw law (temperature never enters it), entropy = logsumexp(l) - sum p l in nats, margin =
p(first) - p(second). Bytes moved: one read of the logits, B * S * V * itemsize.
"""

from __future__ import annotations

from torch import Tensor

from dllm.types import RowStats


def row_stats_reference(
    logits: Tensor,
    needs: frozenset[str] = frozenset({"top1"}),
    banned: Tensor | None = None,
    uniform: Tensor | None = None,
    temperature: float = 0.0,
    law: Tensor | None = None,
    processed_confidence: bool = False,
    previous: Tensor | None = None,
) -> RowStats:
    """Plain PyTorch truth.

    logits [B, S, V] any float dtype; needs: what to compute beside token and confidence ("entropy", "margin", "logits", "previous");
    banned: bool [V] or [B, S, V], ids never proposed (they keep their mass in the law); uniform [B, S] fp32 in (0, 1): with
    temperature > 0 the token is drawn from ``law`` (processed logits [B, S, V], default logits / temperature) by inverting its
    cumulative sum; processed_confidence: take the probability from the processed law instead of the raw one.
    -> RowStats with token [B, S] int64 and fp32 statistics. Accumulates in fp32. log_total is not finite where logits hold NaN or +inf
    or nothing but -inf; single -inf entries are legal (forbidden tokens).
    """
    raw = logits.float()
    log_total = raw.logsumexp(-1)
    allowed = raw if banned is None else raw.masked_fill(banned, float("-inf"))
    if temperature > 0:
        if uniform is None:
            raise ValueError("uniform must be given when temperature > 0: got None")
        drawn = (raw.double() / temperature) if law is None else law.double()
        if banned is not None:
            drawn = drawn.masked_fill(banned, float("-inf"))
        token = sample_by_inversion(drawn, uniform)
    else:
        drawn = allowed
        token = allowed.argmax(-1)
    if processed_confidence and temperature > 0:
        confidence = drawn.softmax(-1).gather(-1, token[..., None])[..., 0].float()
    else:
        confidence = (raw.gather(-1, token[..., None])[..., 0] - log_total).exp()
    entropy = margin = None
    if "entropy" in needs:
        probability = (raw - log_total[..., None]).exp()
        entropy = -(probability * (raw - log_total[..., None]).clamp(min=-1e4)).sum(-1)
    if "margin" in needs:
        top = allowed.topk(2, dim=-1).values
        margin = (top[..., 0] - log_total).exp() - (top[..., 1] - log_total).exp()
    return RowStats(
        token=token,
        confidence=confidence,
        entropy=entropy,
        margin=margin,
        logits=raw if "logits" in needs or "previous" in needs else None,
        previous=previous if "previous" in needs else None,
        log_total=log_total,
    )


def sample_by_inversion(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw one id per row of logits [..., V] with the number uniform [...] in (0, 1): the first id whose cumulative mass exceeds it.

    fp64 inside. An id of probability 0 is never drawn.
    """
    mass = logits.double().softmax(-1).cumsum(-1)
    target = uniform.double()[..., None] * mass[..., -1:]
    # Strictly greater: an id without mass does not raise the sum, so it is never the first to exceed the target.
    return (mass <= target).sum(-1).clamp(max=logits.shape[-1] - 1)


def row_stats(
    logits: Tensor,
    needs: frozenset[str] = frozenset({"top1"}),
    banned: Tensor | None = None,
    uniform: Tensor | None = None,
    temperature: float = 0.0,
    law: Tensor | None = None,
    processed_confidence: bool = False,
    previous: Tensor | None = None,
) -> RowStats:
    """See ``row_stats_reference``, which runs on every device until a Triton kernel is faster."""
    return row_stats_reference(logits, needs, banned, uniform, temperature, law, processed_confidence, previous)
