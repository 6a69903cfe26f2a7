"""A recorded answer that shows at load time whether taps, flags and target are those that a drafter was saved with.

A tap one layer off costs little acceptance and raises no error; the logits of a fixed block after fixed tokens show it
at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dllm.drafters.drafter import Context, Drafter

PROBE_KEY = "probe"
PROBE_TOKENS = 32
PROBE_IDS_SEEN = 16
MAX_RELATIVE_ERROR = 0.04
"""Root mean square of the difference over that of the recorded logits. Measured: bf16 copies 0.01 to 0.02, a flipped
causality 0.05 or more, a tap one layer off 0.1 or more.
"""


def record_probe(drafter: Drafter) -> dict[str, Any]:
    """Tokens and logits to store with a drafter: {"ids": [32], "logits": one list of 16 a slot}."""
    vocab = drafter.target.vocab_size
    ids = [(104729 * (i + 1)) % vocab for i in range(PROBE_TOKENS)]
    return {"ids": ids, "logits": [[round(v, 4) for v in row] for row in _logits(drafter, ids).tolist()]}


def probe_mismatch(drafter: Drafter, probe: Mapping[str, Any]) -> str | None:
    """None if the drafter answers a recorded probe as it did when it was saved, else what is wrong."""
    error = probe_error(drafter, probe)
    if error <= MAX_RELATIVE_ERROR:
        return None
    return (
        f"probe must be answered as recorded (relative error at most {MAX_RELATIVE_ERROR}): got {error:.3f}; "
        "target_layer_ids, is_causal, the weights or the target differ from those that the drafter was saved with"
    )


def probe_error(drafter: Drafter, probe: Mapping[str, Any]) -> float:
    """Relative error of the logits against a recorded probe."""
    recorded = torch.tensor(probe["logits"], dtype=torch.float32)
    got = _logits(drafter, list(probe["ids"])).cpu()
    if recorded.shape != got.shape:
        raise ValueError(f"probe.logits must have shape {tuple(got.shape)}: got {tuple(recorded.shape)}")
    return float((got - recorded).square().mean().sqrt() / recorded.std().clamp(min=1e-6))


@torch.no_grad()
def _logits(drafter: Drafter, ids: list[int]) -> Tensor:
    """Uncorrected logits [n, 16] of a whole block behind ids, at vocabulary entries spread evenly; leaves the drafter
    reset.
    """
    target = drafter.target
    tokens = torch.tensor([ids], device=target.device)
    _, features = target.read(tokens, drafter.config.target_layer_ids)
    drafter.reset(1, len(ids))
    drafter.feed(Context(features[:, :-1].to(drafter.device), torch.ones_like(tokens[:, :-1], dtype=torch.bool)))
    hidden = drafter.block(tokens[:, -1], drafter.config.block_length)[:, 1:]
    head = target.head(hidden)[0].float()
    entries = torch.linspace(0, head.shape[-1] - 1, PROBE_IDS_SEEN, device=head.device).long()
    drafter.reset(1, len(ids))
    return head[:, entries]
