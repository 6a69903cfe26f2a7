"""Tiny random models for tests: the two attention rules of the shipped models, on a CPU, in fp32."""

from __future__ import annotations

import torch

from dllm.model.decoder import Decoder, DecoderConfig
from dllm.pipeline import DiffusionLM
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
