"""In every family the neutral settings equal vanilla greedy: one token a step by confidence, everything recomputed."""

from __future__ import annotations

import pytest
import torch

from dllm.cache.delayed import DelayedCache
from dllm.cache.dual import DualCache
from dllm.cache.free import FreeCache
from dllm.cache.none import NoCache
from dllm.cache.prefix import PrefixCache
from dllm.cache.sliding import SlidingCache
from dllm.cache.vicinity import VicinityCache
from dllm.samplers.dynamic import Dynamic
from dllm.samplers.end_last import EndLast
from dllm.samplers.entropy_bound import EntropyBound
from dllm.samplers.factor import Factor
from dllm.samplers.frechet import Frechet
from dllm.samplers.klass import Klass
from dllm.samplers.low_confidence import LowConfidence
from dllm.samplers.maskgit_plus import MaskgitPlus
from dllm.samplers.static import Static
from dllm.samplers.sub_block import SubBlock
from dllm.samplers.threshold import Threshold
from dllm.samplers.token_editing import TokenEditing
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
]
CACHES = [
    DualCache(refresh_interval=1),
    PrefixCache(refresh_interval=1),
    FreeCache(refresh_interval=1),
    VicinityCache(0, 0, 0, refresh_interval=1),
    SlidingCache(1000),
    DelayedCache(refresh_interval=1),
]


def decode(lm, **options):
    ids = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(3)).tolist()
    out = lm.generate(input_ids=ids, attention_mask=[[1] * 5, [0, 0, 1, 1, 1]], max_new_tokens=9, **options)
    return [out.sequences.tolist(), out.lengths, [s.nfe for s in out.row_stats]]


@pytest.mark.parametrize("folder", FAMILIES)
def test_every_sampler_at_its_neutral_setting_equals_vanilla_greedy(folder):
    lm = golden_lm(folder)
    vanilla = decode(lm, block_length=4, eos_token_id=[], sampler=LowConfidence(1), cache="none")
    for sampler in SAMPLERS:
        found = decode(lm, block_length=4, eos_token_id=[], sampler=sampler, cache="none")
        assert found == vanilla, type(sampler).__name__


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
def test_the_block_cache_equals_no_cache_in_block_causal_families(folder):
    lm = golden_lm(folder)
    for sampler in (LowConfidence(1), Threshold(0.3)):
        options = {"block_length": 4, "eos_token_id": [], "sampler": sampler}
        assert decode(lm, cache="block", **options)[:2] == decode(lm, cache="none", **options)[:2]
