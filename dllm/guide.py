"""The AR guide of a diffusion model: a causal checkpoint, its tokens, and the rule by which it accepts drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dllm.byte_vocabulary import ByteVocabulary
from dllm.families.loading import load_checkpoint
from dllm.hooks import GuideHook
from dllm.hooks_foreign import ForeignGuideHook
from dllm.samplers.guided import Guided
from dllm.target import load_tokenizer, target_folder

VOCABULARIES = ("auto", "same", "intersection", "text")


class ARGuide:
    """A causal language model beside the diffusion model; give it to ``generate(guide=...)``.

    model: has embed, forward, head and new_store as ``Decoder``; eos_token_ids: its stop tokens; tokenizer: a transformers tokenizer or
    None; rule: see ``Guided``; rule numbers may also be given to ``generate``.

    vocabulary: how its tokens meet the diffusion model's. "same": the same ids. "intersection": a drafted token stands for the guide's
    token of the same bytes, and the draft ends before the first token that the guide lacks (after the token-level intersection of
    Timor et al. 2025, arXiv:2502.05202). "text": the draft's bytes are cut into tokens by the guide's tokenizer, and a drafted token is
    kept if every guide token that covers one of its bytes is. "auto": "same" where the vocabularies are equal, else "text".
    With another vocabulary a lossless rule makes the text's bytes those of the guide's own output, in which two kinds of tokens are barred:
    those without bytes (special tokens other than its stops), and those with a byte for which the diffusion model has no token. The
    guide's token may take several slots, and the last one may be cut by max_new_tokens.
    """

    def __init__(
        self,
        model: Any,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Any = None,
        rule: Guided | None = None,
        vocabulary: str = "auto",
        byte_vocabulary: ByteVocabulary | None = None,
    ) -> None:
        """byte_vocabulary: the bytes of the guide's tokens, where no tokenizer tells them."""
        if vocabulary not in VOCABULARIES:
            raise ValueError(f"vocabulary must be one of {VOCABULARIES}: got {vocabulary!r}")
        self.model, self.eos_token_ids, self.tokenizer = model, tuple(eos_token_ids), tokenizer
        self.rule = Guided() if rule is None else rule
        self.vocabulary = vocabulary
        self._bytes = byte_vocabulary
        self._compared: tuple[Any, bool] | None = None

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        vocabulary: str = "auto",
        **rule: Any,
    ) -> ARGuide:
        """A causal checkpoint ("smollm2-135m", a folder or a hub id); rule: numbers of ``Guided`` (accept, on_reject, ...).

        Raises ValueError for a checkpoint that is not causal, TypeError for an unknown number.
        """
        model, spec, _, folder = load_checkpoint(target_folder(name, revision), None, dtype, device)
        if spec.attention != "causal":
            raise ValueError(f"a guide must be a causal AR model: {name} has {spec.attention} attention")
        return cls(model, spec.eos_token_ids, load_tokenizer(folder), Guided(**rule), vocabulary)

    @classmethod
    def of_base(cls, lm: Any, **rule: Any) -> ARGuide:
        """The AR model that ``lm`` was adapted from, in its dtype and on its device; embedding and head are shared.

        Raises ValueError for a model that is no adapter over a base.
        """
        if getattr(lm, "base_folder", None) is None:
            raise ValueError(
                "of_base needs a model that is an adapter over an AR base: got one without; use from_pretrained"
            )
        model, spec, _, _ = load_checkpoint(lm.base_folder, None, lm.model.dtype, lm.device)
        # The adapter leaves both alone, so that one copy serves the two models.
        model.embed_tokens, model.lm_head = lm.model.embed_tokens, lm.model.lm_head
        return cls(model, spec.eos_token_ids, lm.tokenizer, Guided(**rule), "same")

    def with_rule(self, **numbers: Any) -> ARGuide:
        """The same guide with other numbers of its rule."""
        other = ARGuide(
            self.model, self.eos_token_ids, self.tokenizer, replace(self.rule, **numbers), self.vocabulary, self._bytes
        )
        other._compared = self._compared
        return other

    def byte_vocabulary(self) -> ByteVocabulary:
        """The bytes of the guide's tokens; raises ValueError where nothing tells them."""
        if self._bytes is None:
            if self.tokenizer is None:
                raise ValueError("a guide with another vocabulary needs a tokenizer or a byte_vocabulary: got neither")
            width = self.model.head_weight.shape[0]
            self._bytes = ByteVocabulary.from_tokenizer(self.tokenizer, width, self.eos_token_ids)
        return self._bytes

    def same_vocabulary(self, tokenizer: Any, vocab_size: int) -> bool:
        """Whether ids mean the same as in the diffusion model's tokenizer (equal sizes where one of both has none)."""
        if self.tokenizer is tokenizer or self.tokenizer is None or tokenizer is None:
            return self._bytes is None and self.model.head_weight.shape[0] == vocab_size
        # Building both vocabularies takes as long as a hundred tokens; their tokenizers live as long as the answer.
        if self._compared is None or self._compared[0] is not tokenizer:
            self._compared = (tokenizer, self.tokenizer.get_vocab() == tokenizer.get_vocab())
        return self._compared[1]

    def start(self, loop: Any, tokenizer: Any = None, byte_vocabulary: ByteVocabulary | None = None) -> Any:
        """The guide at work in one call of the loop; tokenizer, byte_vocabulary: the diffusion model's."""
        kind = self.vocabulary
        if kind == "auto":
            same = byte_vocabulary is None and self.same_vocabulary(tokenizer, loop.spec.vocab_size)
            kind = "same" if same else "text"
        if kind == "same":
            width = self.model.head_weight.shape[0]
            if width != loop.spec.vocab_size:
                raise ValueError(
                    f"vocabulary 'same' needs a guide with {loop.spec.vocab_size} ids: got {width}; use 'text' or 'intersection'"
                )
            return GuideHook(loop, self.model, self.rule)
        if byte_vocabulary is None:
            if tokenizer is None:
                raise ValueError("a guide with another vocabulary needs the diffusion model's tokenizer: it has none")
            byte_vocabulary = ByteVocabulary.from_tokenizer(tokenizer, loop.spec.vocab_size, loop.request.eos_token_ids)
        return ForeignGuideHook(loop, self.model, self.rule, kind, self.byte_vocabulary(), byte_vocabulary)
