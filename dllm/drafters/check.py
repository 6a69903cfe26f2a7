"""What was loaded and how it drafts: the report behind ``Drafter.check``."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dllm.drafters.drafter import Context, Drafter
from dllm.drafters.probe import PROBE_KEY, probe_error
from dllm.samplers.verify import match


@dataclass(frozen=True)
class Report:
    """kind, layout and numbers of a drafter, and its acceptance on a probe text that the target wrote greedily.

    rope_positions: positions that the drafter and the target were made for. accept_length: mean tokens per pass, the
    target's own included; slot_acceptance[k]: share of passes whose slot k + 1 was accepted given that all before it
    were. template: "same", "other" or "unknown". recorded_error: relative error of the recorded probe, None without
    one.
    """

    kind: str
    layout: str
    target: str
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    block_length: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    vocab_size: int
    rope_positions: tuple[int, int]
    template: str
    recorded_error: float | None
    accept_length: float
    slot_acceptance: tuple[float, ...]

    def __str__(self) -> str:
        return "\n".join(f"{name:16} {value}" for name, value in asdict(self).items())


@torch.no_grad()
def check_drafter(
    drafter: Drafter, prompt_ids: Tensor | None = None, tokenizer: Any = None, num_tokens: int = 48
) -> Report:
    """Draft along a text of ``num_tokens`` tokens that the target writes greedily after the prompt; leaves the drafter
    reset.

    prompt_ids [1, P] int64: None takes a few ids that say nothing, so pass a real prompt for a number that means
    something. tokenizer: compared with the recorded chat template. Raises ValueError if the template is another one.
    """
    config, target = drafter.config, drafter.target
    if num_tokens < 2:
        raise ValueError(f"num_tokens must be >= 2: got {num_tokens}")
    if prompt_ids is None:
        prompt_ids = torch.tensor([[(7919 * (i + 1)) % target.vocab_size for i in range(8)]])
    if prompt_ids.ndim != 2 or prompt_ids.shape[0] != 1:
        raise ValueError(f"prompt_ids must have shape [1, P]: got {tuple(prompt_ids.shape)}")
    template = _template(config.metadata.get("chat_template_sha256"), tokenizer)
    text = _greedy_text(drafter, prompt_ids.to(target.device), num_tokens)
    tried, accepted, passes, committed = [0] * drafter.max_drafts, [0] * drafter.max_drafts, 0, 0
    _, features = target.read(text, config.target_layer_ids)
    features = features.to(drafter.device)
    drafter.reset(1, text.shape[1])
    anchor = prompt_ids.shape[1]
    fed = 0
    while anchor + 1 < text.shape[1]:
        new = features[:, fed:anchor]
        length = min(drafter.max_drafts, text.shape[1] - anchor - 1)
        draft = drafter.propose(
            Context(new, torch.ones(new.shape[:2], dtype=torch.bool, device=new.device)), text[:, anchor], length
        )
        # The text's own next tokens, and one more that no draft is compared with.
        truth = torch.nn.functional.pad(text[:, anchor + 1 : anchor + 1 + length], (0, 1))
        count = int(match(truth, draft.tokens).accepted)
        for k in range(length):
            tried[k] += k <= count
            accepted[k] += k < count
        passes, fed = passes + 1, anchor
        anchor = min(anchor + count + 1, text.shape[1])
        committed += anchor - fed
    drafter.reset(1, text.shape[1])
    recorded = config.metadata.get(PROBE_KEY)
    return Report(
        kind=config.kind,
        layout=config.layout,
        target=target.name,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids,
        block_length=config.block_length,
        windows=config.windows,
        causal=config.causal,
        vocab_size=config.body.vocab_size,
        rope_positions=(config.body.max_positions, target.max_positions),
        template=template,
        recorded_error=None if recorded is None else probe_error(drafter, recorded),
        accept_length=committed / passes,
        slot_acceptance=tuple(a / t for a, t in zip(accepted, tried, strict=True) if t),
    )


def template_hash(tokenizer: Any) -> str | None:
    """Short hash of a tokenizer's chat template, to note beside a drafter; None without a template."""
    template = getattr(tokenizer, "chat_template", None)
    return None if not template else hashlib.sha256(str(template).encode()).hexdigest()[:16]


def _template(noted: str | None, tokenizer: Any) -> str:
    if noted is None or tokenizer is None:
        return "unknown"
    if template_hash(tokenizer) != noted:
        raise ValueError(
            f"chat_template_sha256 must be that of the tokenizer, {template_hash(tokenizer)}: the drafter was trained with {noted}"
        )
    return "same"


def _greedy_text(drafter: Drafter, prompt_ids: Tensor, num_tokens: int) -> Tensor:
    """Prompt and the target's greedy continuation [1, P + num_tokens], stops ignored; a plain loop without a cache."""
    text = prompt_ids
    for _ in range(num_tokens):
        logits, _ = drafter.target.read(text, drafter.config.target_layer_ids[:1])
        text = torch.cat([text, logits[:, -1:].argmax(dim=-1)], dim=1)
    return text
