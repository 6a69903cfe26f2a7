"""A tiny byte-level tokenizer with the vocabulary of the tiny models, multi-byte characters and merged tokens included."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dllm.pipeline import DiffusionLM
from tests.tiny import EOS, FILLER, MASK, START, VOCAB, tiny_lm

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}.{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}a.{% endif %}"
MERGES = [("a", "b"), ("c", "d"), ("t", "h"), ("th", "e"), ("Ġ", "a")]


@lru_cache(maxsize=2)
def byte_tokenizer(template: bool = False) -> PreTrainedTokenizerFast:
    """Bytes of a-z, digits, blanks, some marks, é, € and an emoji, and a few merges: 64 ids, specials at START, EOS, FILLER, MASK."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(letters_used, _)] = split.pre_tokenize_str("abcdefghijklmnopqrstuvwxyz0123 \n.,é€😀")
    letters = sorted(set(letters_used))
    pieces = letters + [a + b for a, b in MERGES]
    special = {START: "<start>", 1: "<unk>", EOS: "<eos>", FILLER: "<filler>", MASK: "<mask>"}
    free = [i for i in range(VOCAB) if i not in special]
    assert len(pieces) <= len(free), f"{len(pieces)} pieces for {len(free)} ids"
    vocab = dict(zip(pieces, free, strict=False))
    vocab |= {f"<{i}>": i for i in free[len(pieces) :]}
    vocab |= {text: i for i, text in special.items()}
    core = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>"))
    core.pre_tokenizer = split
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in special.values()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", unk_token="<unk>", mask_token="<mask>"
    )
    if template:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def speaking(lm: DiffusionLM, template: bool = False) -> DiffusionLM:
    """The same model with the tokenizer."""
    return DiffusionLM(lm.model, lm.spec, byte_tokenizer(template), lm.config)


def text_lm(attention: str = "block_causal", seed: int = 0, template: bool = False, **changes: object) -> DiffusionLM:
    """A tiny random model that reads and writes text."""
    return speaking(tiny_lm(attention, seed, **changes), template)
