"""Names become objects once; numbers that nobody takes, and names that nobody has, raise with the accepted ones."""

from dataclasses import dataclass

import pytest
import torch

from dllm.cache.free import FreeCache
from dllm.registry import CACHES, SAMPLERS, resolve_cache, resolve_sampler
from dllm.samplers.low_confidence import LowConfidence
from dllm.samplers.threshold import Threshold
from dllm.types import Step
from tests.tiny import tiny_lm

IDS = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_every_named_sampler_loads_with_its_defaults(name):
    sampler = resolve_sampler(name, {}, {})
    assert callable(sampler.step)
    assert sampler.needs


@pytest.mark.parametrize("name", sorted(CACHES))
def test_every_named_cache_loads_with_its_defaults(name):
    cache = resolve_cache(name, {})
    assert callable(cache.plan)
    assert isinstance(cache.uses_store, bool)


def test_numbers_go_to_the_object_that_has_them_and_are_taken_out():
    options = {"threshold": 0.4, "freeze_delay": 1}
    assert resolve_sampler("threshold", options, {"threshold": 0.9}) == Threshold(0.4)
    assert options == {"freeze_delay": 1}
    assert resolve_cache("free", options) == FreeCache(freeze_delay=1)
    assert options == {}


def test_the_models_default_number_holds_where_none_is_given():
    assert resolve_sampler("threshold", {}, {"threshold": 0.7}) == Threshold(0.7)
    assert resolve_sampler("low_confidence", {}, {"threshold": 0.7}) == LowConfidence()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"foo": 1}, TypeError, "foo.*accepted.*max_new_tokens"),
        ({"sampler": "low_confidence", "threshold": 0.5}, TypeError, "threshold.*LowConfidence.*'k'"),
        ({"sampler": Threshold(), "threshold": 0.5}, TypeError, "threshold"),
        ({"sampler": "threshold", "k": 2}, TypeError, "'k'"),
        ({"cache": "none", "freeze_delay": 1}, TypeError, "freeze_delay.*NoCache"),
        ({"cache": "dual", "freeze_delay": 1}, TypeError, "freeze_delay.*DualCache"),
        ({"sampler": "entropie"}, ValueError, "sampler must be one of.*threshold.*got 'entropie'"),
        ({"cache": "paged"}, ValueError, "cache must be one of.*block.*got 'paged'"),
        ({"sampler": Threshold}, TypeError, "sampler must be one of"),
        ({"cache": 3}, TypeError, "cache must be one of"),
        ({"verifier": 1.0}, TypeError, "verifier"),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, dict) else None,
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_generate_and_stream_refuse_at_the_call_what_nobody_takes(call, kwargs, error, message):
    lm = tiny_lm()
    if call == "stream":
        lm.tokenizer = object()
    with pytest.raises(error, match=message):
        getattr(lm, call)(input_ids=IDS, max_new_tokens=8, **kwargs)


@dataclass(frozen=True)
class Curious:
    """A sampler that asks for a statistic that does not exist."""

    needs = frozenset({"top1", "topk"})

    def step(self, rows, canvas, masked, state, noise):
        return Step(rows.token, masked)


class Plain:
    """A sampler that is no dataclass."""

    needs = frozenset({"top1"})

    def step(self, rows, canvas, masked, state, noise):
        return Step(rows.token, masked)


def test_a_sampler_that_needs_what_the_loop_does_not_compute_raises():
    with pytest.raises(ValueError, match="sampler needs.*topk"):
        tiny_lm().generate(input_ids=IDS, max_new_tokens=8, sampler=Curious())


def test_a_sampler_need_not_be_a_dataclass_and_an_unknown_argument_beside_it_is_still_named():
    lm = tiny_lm(eos_token_ids=())
    assert lm.generate(input_ids=IDS, max_new_tokens=9, sampler=Plain()).lengths == [9]
    with pytest.raises(TypeError, match="unknown argument 'foo'"):
        lm.generate(input_ids=IDS, max_new_tokens=8, sampler=Plain(), foo=1)
