"""Drafters in transformers' own assisted decoding (one row): a ``CandidateGenerator``, and a stand-in for the assistant
model of ``generate(..., assistant_model=..., speculation_type="dflash")``.

``dllm.bridge.huggingface`` is the loop to prefer: it takes batches, keeps the drafter's choice and law, and honours stop
strings inside a block. Letters: C context tokens, S slots of a block (the anchor first), F width of the taps, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config
from transformers.generation import CandidateGenerator, DFlashTokenCandidateGenerator
from transformers.modeling_outputs import BaseModelOutput

from dllm.drafters.dflash2 import DFlash2
from dllm.drafters.dfly import DFly
from dllm.drafters.drafter import Context, Drafter
from dllm.noise import CounterNoise


class DraftCandidateGenerator(CandidateGenerator):
    """Candidates from a drafter, for whoever drives transformers' assisted loop (contract of 5.17 and 5.24).

    Its taps are forward hooks on the target from construction to ``close``, so it works for any tapped layer. max_length:
    tokens of the text with its prompt. draft_temperature 0: argmax drafts without candidate logits, which the loop tests
    for equality with its own choice; above 0 the law of each draft is handed on, as its rejection test needs.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}  # noqa: RUF012  the name and kind that transformers' loop reads

    def __init__(
        self,
        drafter: Drafter,
        max_length: int,
        num_drafts: int | None = None,
        draft_temperature: float = 0.0,
        seed: int | None = None,
    ) -> None:
        count = drafter.max_drafts if num_drafts is None else num_drafts
        if not 1 <= count <= drafter.max_drafts:
            raise ValueError(f"num_drafts must be in [1, {drafter.max_drafts}]: got {count}")
        self.drafter, self.max_length, self.num_drafts = drafter, max_length, count
        self.draft_temperature = draft_temperature
        self.noise = CounterNoise.for_rows(seed, 1, drafter.device)
        self.hooks = drafter.target.taps(drafter.config.target_layer_ids)
        self.found = self.hooks.__enter__()
        self.is_fed = False

    def close(self) -> None:
        """Take the hooks off the target."""
        self.hooks.__exit__(None, None, None)

    def get_candidates(
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = True,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """input_ids [1, L] -> (ids [1, L + n], logits [1, n, V] of the drafts' laws or None); none before the prefill."""
        if input_ids.shape[0] != 1:
            raise ValueError(f"input_ids must be one row, as in transformers' assisted loop: got {input_ids.shape[0]}")
        drafter = self.drafter
        if is_first_iteration:
            drafter.reset(1, self.max_length)
            self.is_fed = False
            return input_ids, None
        length = min(self.num_drafts, self.max_length - input_ids.shape[1])
        count = n_last_matches + 1 if self.is_fed else input_ids.shape[1] - 1
        features = torch.cat([self.found[i][:, :count] for i in drafter.config.target_layer_ids], dim=-1)
        mask = (model_kwargs or {}).get("attention_mask")
        valid = torch.ones(1, count, dtype=torch.bool) if mask is None else mask[:, -count - 1 : -1].bool()
        self.is_fed = True
        context = Context(features.to(drafter.device), valid.to(drafter.device))
        if length < 1:
            drafter.feed(context)
            return input_ids, None
        anchor = input_ids[:, -1].to(drafter.device)
        draft = drafter.propose(context, anchor, length, self.draft_temperature, self.noise)
        ids = torch.cat([input_ids, draft.tokens.to(input_ids.device)], dim=1)
        return ids, None if draft.probs is None else draft.probs.log().to(input_ids.device)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing is adapted."""


class DFlashAssistant:
    """What transformers' "dflash" speculation asks of an assistant model: ``config``, ``device`` and a call that gives the
    final hidden states of a block. ``close`` takes its hook off the target.

    The slots' logits are formed and chosen by transformers, so a DFly walks its correction along the argmax, and a
    DFlash2, whose choice is no head product, is refused; so are an own head and the target's last layer as a tap.
    max_length: tokens of the text with its prompt.
    """

    def __init__(self, drafter: Drafter, max_length: int) -> None:
        config, body = drafter.config, drafter.config.body
        if isinstance(drafter, DFlash2) or drafter.lm_head is not None:
            raise ValueError(
                f"drafter must choose by the target's head alone for speculation_type='dflash': a {config.kind} "
                f"{'has a head of its own' if drafter.lm_head is not None else 'selects among candidates'}; "
                "use as_custom_generate()"
            )
        if max(config.target_layer_ids) == drafter.target.num_layers - 1:
            raise ValueError(
                "target_layer_ids must not hold the last layer, which transformers gives after the final norm: got "
                f"{list(config.target_layer_ids)}"
            )
        self.drafter, self.max_length = drafter, max_length
        self.config = Qwen3Config(
            vocab_size=body.vocab_size,
            hidden_size=body.hidden_size,
            intermediate_size=body.intermediate_size,
            num_hidden_layers=body.num_layers,
            num_attention_heads=body.num_heads,
            num_key_value_heads=body.num_kv_heads,
            head_dim=body.head_dim,
        )
        self.config.block_size = config.block_length
        self.config.mask_token_id = config.mask_token_id
        self.config.target_layer_ids = list(config.target_layer_ids)
        if self._index_of(0) == 0:
            # An early contract (5.17) takes indices of hidden_states, where 0 is the embedding.
            self.config.target_layer_ids = [i + 1 for i in config.target_layer_ids]
        self.block_ids: Tensor | None = None
        embedding = drafter.target.model.get_input_embeddings()
        # The contract hands on the block's embeddings; the drafter wants its ids.
        self.hook = embedding.register_forward_hook(self._keep_ids)
        self.request: Any = None

    @property
    def device(self) -> torch.device:
        return self.drafter.device

    def close(self) -> None:
        """Take the hook off the target."""
        self.hook.remove()

    def _keep_ids(self, module: Any, inputs: Any, output: Any) -> None:
        self.block_ids = inputs[0]

    def _index_of(self, layer: int) -> int:
        """Index of hidden_states that this version of transformers reads for a layer id."""

        class Probe:
            config, device = self.config, torch.device("cpu")

        kept, self.config.target_layer_ids = self.config.target_layer_ids, [layer]
        probe = DFlashTokenCandidateGenerator(Probe, None, None, GenerationConfig())
        self.config.target_layer_ids = kept
        return probe.model_kwargs_overrides["output_hidden_states"][0]

    @torch.no_grad()
    def __call__(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
    ) -> BaseModelOutput:
        """noise_embeds [1, S, D], context_hidden_states [1, C, F] of newly committed tokens, position_ids [1, C + S] ->
        ``last_hidden_state`` [1, S, D].
        """
        drafter, request = self.drafter, cache if past_key_values is None else past_key_values
        slots, count = noise_embeds.shape[1], context_hidden_states.shape[1]
        if request is not self.request:
            self.request = request
            drafter.reset(1, self.max_length)
            for layer in request.layers:
                # The drafter keeps its context itself; transformers crops this cache all the same.
                layer.keys = layer.values = noise_embeds.new_zeros(1, 1, 0, 1)
        valid = torch.ones(1, count, dtype=torch.bool, device=self.device)
        if attention_mask is not None:
            valid = attention_mask[:, -count - slots : -slots].to(self.device).bool()
        drafter.feed(Context(context_hidden_states.to(self.device), valid))
        assert self.block_ids is not None and self.block_ids.shape[1] == slots, "the block was embedded last"
        anchor = self.block_ids[:, 0].to(self.device)
        hidden = drafter.block(anchor, slots)
        if isinstance(drafter, DFly) and drafter.hidden_correction is not None:
            previous = anchor
            corrected = [hidden[:, 0]]
            for k in range(1, slots):
                row = drafter.hidden_correction(hidden[:, k], drafter.target.embed(previous).to(drafter.dtype))
                corrected.append(row)
                previous = drafter.logits(row).argmax(dim=-1)
            hidden = torch.stack(corrected, dim=1)
        return BaseModelOutput(last_hidden_state=hidden.to(noise_embeds.dtype))
