"""The tokenizer inside a GGUF file: byte-level BPE with digits apart, as SmolLM and SmolLM2 were trained.

Built here rather than by transformers' own GGUF conversion, which leaves out the digit rule (5.24), so that "\\n\\n1"
becomes other tokens than the model knows it by, and mixes up the special tokens as well (5.17).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["read_gguf_tokenizer"]

# Values of tokenizer.ggml.token_type for tokens that are matched before the text is split.
CONTROL, USER_DEFINED = 3, 4


def read_gguf_tokenizer(path: str | Path, model_max_length: int | None = None) -> Any:
    """A GGUF file -> transformers' PreTrainedTokenizerFast, with the special tokens and the chat template of the file.

    The few bytes that the vocabulary lacks (rare control characters and planes of Unicode) are dropped from a text, as
    by the published tokenizer. Raises ValueError, naming the file, if it holds another kind of tokenizer
    (`tokenizer.ggml.pre` must be smollm).
    """
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    reader = gguf.GGUFReader(path)

    def field(name: str) -> Any:
        found = reader.get_field(name)
        return None if found is None else found.contents()

    for name, wanted in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if field(name) != wanted:
            raise ValueError(f"{path}: {name} must be {wanted}: got {field(name)!r}")
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(t, special=kind == CONTROL, normalized=False) for t, kind in whole])

    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: field(f"tokenizer.ggml.{theirs}_token_id") for role, theirs in roles.items()}
    named: dict[str, Any] = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    if model_max_length is not None:
        named["model_max_length"] = model_max_length
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)
    fast.chat_template = field("tokenizer.chat_template")
    return fast
