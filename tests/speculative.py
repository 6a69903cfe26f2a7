"""Tiny AR targets of both kinds, random drafters for them, and a drafter that knows the text and errs where it is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dllm.drafters.dflash import DFlash
from dllm.drafters.target import Target
from dllm.types import Draft
from tests.drafters.toy import CLASSES, toy_config, toy_target

VOCAB, LAYERS = 40, 4
KINDS = ["dflash", "dflash2", "dfly"]
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


def own_target(seed=0, vocab=VOCAB):
    """A decoder of ours."""
    return toy_target(vocab, LAYERS, seed)


def hf_target(seed=0, model_class=LlamaForCausalLM, config_class=LlamaConfig, **changes):
    """A Hugging Face model with random weights and wide arg-max margins."""
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **changes})).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    head.mul_(5)
    embedding.normal_(0, 1)
    return model


TARGETS: dict[str, Callable[..., Any]] = {"own": own_target, "hf": hf_target}


def target_shape(target):
    return SimpleNamespace(
        config=SimpleNamespace(vocab_size=Target.of(target).vocab_size, hidden_size=16, num_layers=LAYERS)
    )


def random_drafter(kind, target, seed=1, block_length=8, **changes):
    """A drafter of any kind with random weights for a target of either kind."""
    torch.manual_seed(seed)
    config = toy_config(kind, target_shape(target), block_length=block_length, **changes)
    drafter = CLASSES[kind](config, target).eval().requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1 and "base_kernel" not in name:
            parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter


class Scripted(DFlash):
    """Drafts what ``texts`` (one whole text a row, prompt included) say, but a wrong token at the positions in ``wrong``.

    lengths_seen: the drafter's lengths at each pass, for tests of what it was fed.
    """

    def __init__(self, target, texts, wrong=(), block_length=8):
        super().__init__(toy_config("dflash", target_shape(target), block_length=block_length), target)
        self.eval().requires_grad_(False)
        width = max(map(len, texts)) + 2 * block_length
        self.whole = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        self.wrong = torch.tensor(sorted(wrong), dtype=torch.int64)
        self.lengths_seen = []

    def reset(self, batch, capacity):
        super().reset(batch, capacity)
        self.texts = self.whole

    def select(self, keep):
        super().select(keep)
        self.texts = self.texts[keep]

    def choose(self, hidden, anchor, temperature, uniform):
        self.lengths_seen.append(self.lengths.tolist())
        # The anchor is what the loop says it is: a misplaced one would draft along another text.
        assert anchor.tolist() == self.texts.gather(1, self.lengths[:, None]).squeeze(1).tolist()
        positions = self.lengths[:, None] + torch.arange(1, hidden.shape[1] + 1)
        tokens = self.texts.gather(1, positions)
        errs = torch.isin(positions, self.wrong)
        return Draft(torch.where(errs, (tokens + 1) % VOCAB, tokens), None, torch.full(tokens.shape, 0.5))


def greedy_text(target, prompt, count):
    """Prompt and greedy continuation by whole passes, no cache: the truth."""
    bound, ids = Target.of(target), torch.tensor([prompt])
    for _ in range(count):
        logits, _ = bound.read(ids, [0])
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids[0].tolist()


def prompts(seed=0, lengths=(3, 6, 4, 1)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def padded(rows, side="left", value=0):
    """input_ids and attention_mask of ragged rows."""
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        gap = [value] * (width - len(row))
        ids.append(gap + row if side == "left" else row + gap)
        mask.append([0] * len(gap) + [1] * len(row) if side == "left" else [1] * len(row) + [0] * len(gap))
    return torch.tensor(ids), torch.tensor(mask)


def tokens(output, row=0):
    return output.sequences[row, : output.lengths[row]].tolist()
