"""DiffusionGemma's vanilla, written by hand over the published class: everything recomputed, one token a forward.

The model has no mask token, so its vanilla is not that of masked models. A canvas starts as random tokens. A forward computes the whole
text before the canvas and the whole canvas, conditioned on the laws of the forward before. Then there are two published ways on, and
each has its one-token-a-forward end:
- block refinement: the surest open slot is filled for good with its arg-max, and all other open slots get new random tokens; a block of S
  slots takes S forwards;
- the canvas under an entropy bound of 0: the slot of lowest entropy keeps its arg-max until the next forward, all others get new random
  tokens, none is filled for good; after N forwards the arg-maxes of the last law are the block.
Samplers of masked models run here, too, on a canvas that keeps its first random tokens; their neutral settings equal each other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dllm.cache.block import BlockCache
from dllm.cache.none import NoCache
from dllm.cache.sub_block import SubBlockCache
from dllm.noise import STREAM_CANVAS, CounterNoise
from dllm.samplers.block_refinement import BlockRefinement
from dllm.samplers.low_confidence import LowConfidence
from dllm.samplers.uniform_canvas import UniformCanvas
from tests.families.golden import golden_lm, needs_gemma
from tests.families.test_neutral import CACHES, SAMPLERS

pytestmark = needs_gemma

PROMPTS = [[40, 7, 91, 15, 22, 8, 130], [11, 200, 63]]
LENGTH, BLOCK, SEED = 9, 5, 5
REFINEMENT = BlockRefinement(threshold=1.5, num_steps=1)
# The step limit is the number of forwards a block: a block of S slots that fills one a forward takes S.
CANVAS = UniformCanvas(bound=0.0, t_min=1.0, t_max=1.0, confidence_threshold=0.0, sample=False)


@pytest.fixture(scope="module")
def lm():
    return golden_lm("diffusion_gemma")


def decode(lm, sampler, rows=PROMPTS, cache=None, seed=SEED, steps=BLOCK, length=LENGTH):
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    flags = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    out = lm.generate(
        input_ids=ids,
        attention_mask=flags,
        max_new_tokens=length,
        block_length=BLOCK,
        max_denoising_steps=steps,
        sampler=sampler,
        cache=NoCache() if cache is None else cache,
        seed=seed,
        eos_token_id=[],
    )
    return out.sequences.tolist()


@torch.no_grad()
def by_hand(lm, prompt, seed, rule, length=LENGTH):
    """One row over transformers' own class; rule "refine" or "canvas"."""
    text, noise = list(prompt), CounterNoise.for_rows(seed, 1)
    while len(text) < len(prompt) + length:
        size = min(BLOCK, len(prompt) + length - len(text))
        slots = torch.arange(len(text), len(text) + size)[None]

        def random(step, slots=slots):
            uniform = noise.uniform(slots, torch.tensor([step]), STREAM_CANVAS)
            return (uniform[0] * lm.spec.vocab_size).long()

        canvas, law, filled = random(-1), None, torch.zeros(size, dtype=torch.bool)
        for step in range(BLOCK):
            law = lm.model.wrapped(
                input_ids=torch.tensor([text]), decoder_input_ids=canvas[None], self_conditioning_logits=law
            ).logits
            chance = law[0].float().softmax(-1)
            if rule == "refine":
                # A step owes what an even schedule over BLOCK forwards does; in a cut block some steps owe nothing.
                owed = -(-(step + 1) * size // BLOCK) - int(filled.sum())
                sure = chance.amax(-1).masked_fill(filled, -1.0)
                for slot in sure.argsort(descending=True)[:owed].tolist():
                    canvas[slot], filled[slot] = chance[slot].argmax(), True
                canvas = torch.where(filled, canvas, random(step))
            else:
                kept = torch.distributions.Categorical(chance).entropy().argmin()
                best = chance.argmax(-1)
                canvas = random(step)
                canvas[kept] = best[kept]
        text += (canvas if rule == "refine" else chance.argmax(-1)).tolist()
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def vanilla(lm):
    rules = {"refine": REFINEMENT, "canvas": CANVAS}
    return {rule: ([by_hand(lm, row, SEED + b, rule) for b, row in enumerate(PROMPTS)], s) for rule, s in rules.items()}


@pytest.mark.parametrize("rule", ["refine", "canvas"])
def test_the_neutral_setting_of_a_canvas_sampler_equals_the_loop_written_by_hand(lm, vanilla, rule):
    want, sampler = vanilla[rule]
    assert decode(lm, sampler) == want
    # The number of forwards a block is a number of the sampler as well as a limit of the call.
    assert decode(lm, replace(sampler, num_steps=BLOCK), steps=None) == want


@pytest.mark.parametrize("rule", ["refine", "canvas"])
@pytest.mark.parametrize("cache", [*CACHES, BlockCache(), SubBlockCache(64)], ids=lambda c: type(c).__name__)
def test_every_cache_that_refreshes_in_every_step_and_every_exact_one_equals_the_loop_written_by_hand(
    lm, vanilla, rule, cache
):
    want, sampler = vanilla[rule]
    assert decode(lm, sampler, cache=cache) == want


def test_every_sampler_of_masked_models_at_its_neutral_setting_equals_the_surest_slot_a_forward(lm):
    want = decode(lm, LowConfidence(1), steps=None)
    for sampler in SAMPLERS:
        assert decode(lm, sampler, steps=None) == want, type(sampler).__name__


def test_a_refinement_that_edits_differs_so_that_these_comparisons_can_fail(lm, vanilla):
    want, sampler = vanilla["refine"]
    assert decode(lm, replace(sampler, editing_threshold=1.5)) == want
    assert decode(lm, replace(sampler, editing_threshold=0.0)) != want
    assert decode(lm, replace(sampler, threshold=0.0)) != want
    assert decode(lm, replace(CANVAS, bound=3.0)) != vanilla["canvas"][0]
