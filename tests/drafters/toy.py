"""Drafters of every kind with random weights, small enough to draw thousands of rows from."""

import torch

from dllm.drafters.config import DraftConfig
from dllm.drafters.dflash import DFlash
from dllm.drafters.dflash2 import DFlash2
from dllm.drafters.dfly import DFly
from dllm.drafters.drafter import Context
from dllm.model.decoder import Decoder, DecoderConfig

CLASSES = {"dflash": DFlash, "dflash2": DFlash2, "dfly": DFly}


def toy_target(vocab=8, layers=4, seed=0):
    torch.manual_seed(seed)
    config = DecoderConfig(vocab, 16, 24, layers, 2, 1, 8, 128, qk_norm=True)
    decoder = Decoder(config).eval().requires_grad_(False)
    assert decoder.lm_head is not None
    decoder.lm_head.weight.normal_(0, 0.5)
    return decoder


def toy_config(kind, target, layers=2, windows=None, causal=None, taps=(0, 2), block_length=6, **changes):
    c = target.config
    body = DecoderConfig(c.vocab_size, c.hidden_size, 24, layers, 2, 1, 8, 128, qk_norm=True, tie_embeddings=True)
    values = dict(
        kind=kind,
        layout="angelspec" if kind == "dfly" else "z-lab",
        body=body,
        target_layer_ids=taps,
        mask_token_id=c.vocab_size - 1,
        block_length=block_length,
        windows=windows or (None,) * layers,
        causal=causal or (False,) * layers,
        target_hidden_size=c.hidden_size,
        num_target_layers=c.num_layers,
        correction_width=12 if kind == "dfly" else None,
    )
    if kind == "dflash2":
        values.update(conv_kernel_size=2, conv_group_size=4, selector_rank=3, selector_top_k=min(5, c.vocab_size))
    values.update(changes)
    return DraftConfig(**values)


def toy_drafter(kind, target=None, seed=1, **changes):
    """A drafter with random weights in every part, so that nothing is at its neutral start."""
    target = toy_target() if target is None else target
    torch.manual_seed(seed)
    options = {"head_candidates": changes.pop("head_candidates", None)} if kind == "dfly" else {}
    drafter = CLASSES[kind](toy_config(kind, target, **changes), target, **options).eval().requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1 and "base_kernel" not in name:
            parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter


def context(drafter, batch, tokens, seed=2, valid=None):
    torch.manual_seed(seed)
    features = torch.randn(batch, tokens, drafter.config.feature_width)
    return Context(features, torch.ones(batch, tokens, dtype=torch.bool) if valid is None else valid)
