"""In every family with a mask token the neutral settings equal vanilla greedy: one token a forward by confidence, everything recomputed.

Samplers with another score than confidence (margin, entropy) have a vanilla of that order, which all that share the score must equal.
Drawing ones (random, first_hitting, ancestral) and sequential have no setting that is greedy by a score; they are tested by themselves.
DiffusionGemma has no mask token and another vanilla: see ``test_neutral_gemma.py``, which also takes uniform_canvas and block_refinement.
"""

from __future__ import annotations

import math

import pytest
import torch

from dllm.cache.block import BlockCache
from dllm.cache.delayed import DelayedCache
from dllm.cache.dual import DualCache
from dllm.cache.free import FreeCache
from dllm.cache.none import NoCache
from dllm.cache.prefix import PrefixCache
from dllm.cache.sliding import SlidingCache
from dllm.cache.sub_block import SubBlockCache
from dllm.cache.vicinity import VicinityCache
from dllm.registry import CACHES as CACHE_NAMES
from dllm.registry import SAMPLERS as SAMPLER_NAMES
from dllm.samplers.ada_block import AdaBlock
from dllm.samplers.confidence_threshold import ConfidenceThreshold
from dllm.samplers.dream_entropy import DreamEntropy
from dllm.samplers.dynamic import Dynamic
from dllm.samplers.end_last import EndLast
from dllm.samplers.entropy import Entropy
from dllm.samplers.entropy_bound import EntropyBound
from dllm.samplers.factor import Factor
from dllm.samplers.frechet import Frechet
from dllm.samplers.free_dave import FreeDave
from dllm.samplers.klass import Klass
from dllm.samplers.low_confidence import LowConfidence
from dllm.samplers.margin import Margin
from dllm.samplers.maskgit_plus import MaskgitPlus
from dllm.samplers.s2d2 import S2D2
from dllm.samplers.static import Static
from dllm.samplers.sub_block import SubBlock
from dllm.samplers.threshold import Threshold
from dllm.samplers.token_editing import TokenEditing
from dllm.samplers.topk_margin import TopkMargin
from dllm.samplers.wino import Wino
from tests.families.golden import NAMES, golden_lm

FAMILIES = [name for name in NAMES if name != "diffusion_gemma"]
SAMPLERS = [
    Threshold(1.5),
    Factor(0.0),
    Frechet(1.0),
    EntropyBound(0.0, by_confidence=True),
    Klass(0.5, max_kl=0.0),
    MaskgitPlus(),
    Static(1),
    Dynamic(1.5),
    EndLast(()),
    SubBlock(1.5, sub_block_length=64),
    TokenEditing(1.5, editing_threshold=1.5),
    ConfidenceThreshold(1.5),
]
# A shadow row stands for its slot itself, so that shifted models refuse it.
UNSHIFTED = [Wino(1.5, verify_threshold=0.0)]
BY_OTHER_SCORES = {"margin": [Margin(1), TopkMargin()], "entropy": [Entropy(1), EntropyBound(0.0), DreamEntropy()]}
NO_GREEDY_ORDER = {"random", "first_hitting", "ancestral", "sequential"}
OF_CANVASES = {"uniform_canvas", "block_refinement"}
CACHES = [
    DualCache(refresh_interval=1),
    PrefixCache(refresh_interval=1),
    FreeCache(refresh_interval=1),
    VicinityCache(0, 0, 0, refresh_interval=1),
    SlidingCache(1000),
    DelayedCache(refresh_interval=1),
]
EXACT = [BlockCache(), SubBlockCache(64)]


def decode(lm, **options):
    ids = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(3)).tolist()
    out = lm.generate(input_ids=ids, attention_mask=[[1] * 5, [0, 0, 1, 1, 1]], max_new_tokens=7, **options)
    return [out.sequences.tolist(), out.lengths, [s.nfe for s in out.row_stats]]


@pytest.mark.parametrize("folder", FAMILIES)
def test_every_sampler_at_its_neutral_setting_equals_vanilla_greedy(folder):
    lm = golden_lm(folder)
    vanilla = decode(lm, block_length=4, eos_token_id=[], sampler=LowConfidence(1), cache="none")
    assert vanilla[2] == [7, 7], "one token a forward"
    for sampler in SAMPLERS + ([] if lm.spec.logits_shift else UNSHIFTED):
        found = decode(lm, block_length=4, eos_token_id=[], sampler=sampler, cache="none")
        assert found == vanilla, type(sampler).__name__


@pytest.mark.parametrize("folder", FAMILIES)
def test_samplers_that_share_another_score_equal_each_other_at_one_token_a_forward(folder):
    lm = golden_lm(folder)
    for name, (first, *others) in BY_OTHER_SCORES.items():
        vanilla = decode(lm, block_length=4, eos_token_id=[], sampler=first, cache="none")
        for sampler in others:
            found = decode(lm, block_length=4, eos_token_id=[], sampler=sampler, cache="none")
            assert found == vanilla, (name, type(sampler).__name__)


@pytest.mark.parametrize("folder", FAMILIES)
def test_verifiers_and_block_policies_at_their_neutral_setting_equal_vanilla_greedy(folder):
    lm = golden_lm(folder)
    options = {"eos_token_id": [], "sampler": LowConfidence(1), "cache": "none"}
    vanilla = decode(lm, block_length=4, **options)
    assert decode(lm, block_length=4, verifier=FreeDave(draft_steps=1), **options) == vanilla
    if lm.spec.attention == "bidirectional":
        assert decode(lm, block_length=AdaBlock(1.5, (30,), default=4), **options) == vanilla
    else:
        # The view of S2D2 reads stored rows, so that it goes with a cache that stores what stands before the block.
        stored = {**options, "cache": "block", "block_length": 4}
        assert decode(lm, verifier=S2D2(cost=math.inf), **stored) == decode(lm, **stored)
        assert decode(lm, verifier=S2D2(cost=math.inf), **stored)[:2] == vanilla[:2]


def test_no_sampler_and_no_cache_is_missing_here():
    tested = {type(sampler).__name__ for sampler in [LowConfidence(1), *SAMPLERS, *UNSHIFTED]}
    tested |= {type(sampler).__name__ for group in BY_OTHER_SCORES.values() for sampler in group}
    assert {
        n for n, place in SAMPLER_NAMES.items() if place.split(":")[1] not in tested
    } == NO_GREEDY_ORDER | OF_CANVASES
    caches = {type(cache).__name__ for cache in [NoCache(), *CACHES, *EXACT]}
    assert caches == {place.split(":")[1] for place in CACHE_NAMES.values()}


@pytest.mark.parametrize("folder", FAMILIES)
def test_every_cache_that_refreshes_in_every_step_equals_no_cache(folder):
    lm = golden_lm(folder)
    choices: tuple[list[int] | None, ...] = ([], None)
    for stops in choices:
        truth = decode(lm, block_length=4, eos_token_id=stops, sampler=Threshold(0.5), cache=NoCache())
        for cache in CACHES:
            found = decode(lm, block_length=4, eos_token_id=stops, sampler=Threshold(0.5), cache=cache)
            assert found[:2] == truth[:2], cache


@pytest.mark.parametrize("folder", ["sdar", "fast_dllm_v2", "llada2_moe", "bd3lm"])
def test_the_exact_caches_equal_no_cache_in_block_causal_families(folder):
    lm = golden_lm(folder)
    for sampler in (LowConfidence(1), Threshold(0.3)):
        options = {"block_length": 4, "eos_token_id": [], "sampler": sampler}
        truth = decode(lm, cache="none", **options)[:2]
        for cache in EXACT:
            assert decode(lm, cache=cache, **options)[:2] == truth, cache
