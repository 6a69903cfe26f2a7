"""Tiny random models for tests: the two attention rules of the shipped models, on a CPU, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dllm.cache.none import NoCache
from dllm.canvas import Canvas
from dllm.denoise import DenoiseRequest
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.noise import CounterNoise
from dllm.output import GenerationOutput
from dllm.pipeline import DiffusionLM
from dllm.samplers.threshold import Threshold
from dllm.types import DecodeSpec

VOCAB, MASK, EOS, FILLER, START = 64, 63, 2, 62, 0


def tiny_decoder(seed: int = 0, layers: int = 2, sharpness: float = 4.0) -> Decoder:
    """A random decoder whose logits have a standard deviation of a few nats, so that arg-max margins are wide.

    Its queries and keys are large, so that what a masked row predicts depends on where it is and on what it sees.
    """
    torch.manual_seed(seed)
    config = DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=256,
    )
    decoder = Decoder(config).eval().requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() > 1:
            scale = 3.6 if "qkv" in name else 2.4 if "layers" in name else 1.2
            parameter.normal_(0, scale / parameter.shape[-1] ** 0.5)
        if name == "lm_head.weight":
            parameter.mul_(sharpness)
    decoder.embed_tokens.weight.normal_(0, 1)
    return decoder


def tiny_spec(attention: str = "block_causal", **changes: object) -> DecodeSpec:
    """The shipped models' conventions (shifted, blocks of 8 from the prompt's end) at a tiny vocabulary."""
    values: dict = dict(
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
        logits_shift=1,
        attention=attention,
        block_length=8,
        max_positions=256,
        vocab_size=VOCAB,
        block_origin="prompt",
        infill="rank" if attention == "block_causal" else "canvas",
        filler_token_id=FILLER,
        document_start_id=START,
    )
    values.update(changes)
    return DecodeSpec(**values)


def tiny_lm(attention: str = "block_causal", seed: int = 0, **changes: object) -> DiffusionLM:
    """A DiffusionLM without tokenizer."""
    return DiffusionLM(tiny_decoder(seed), tiny_spec(attention, **changes))


def prompt(length: int, seed: int = 0) -> list[int]:
    """Ordinary ids, the same for the same numbers."""
    return torch.randint(3, 60, (length,), generator=torch.Generator().manual_seed(100 * length + seed)).tolist()


def padded(rows: Sequence[list[int]], side: str = "left", value: int = 0) -> dict[str, Any]:
    """input_ids and attention_mask of ragged rows, padded on one side with any value."""
    width = max(map(len, rows))
    gaps = [[value] * (width - len(row)) for row in rows]
    ids = [gap + row if side == "left" else row + gap for gap, row in zip(gaps, rows, strict=True)]
    flags = [[0] * len(gap) + [1] * len(row) for gap, row in zip(gaps, rows, strict=True)]
    mask = [row if side == "left" else row[::-1] for row in flags]
    return dict(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))


def tokens(output: GenerationOutput, row: int = 0) -> list[int]:
    """A row's new tokens."""
    return output.sequences[row, : output.lengths[row]].tolist()


def loop_request(canvas: Canvas, spec: DecodeSpec, **changes: Any) -> DenoiseRequest:
    """A request for the bare loop: greedy, one token a step, no cache."""
    banned = torch.zeros(spec.vocab_size, dtype=torch.bool)
    banned[[MASK, FILLER]] = True
    values: dict[str, Any] = dict(
        canvas=canvas,
        spec=spec,
        sampler=Threshold(2.0),
        cache=NoCache(),
        noise=CounterNoise.for_rows(0, canvas.ids.shape[0]),
        block_length=spec.block_length,
        banned=banned,
    )
    return DenoiseRequest(**(values | changes))
