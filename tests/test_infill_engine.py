"""Infilling runs the model that the engine names, as generation does: on CUDA that is the decoder on our kernels."""

from __future__ import annotations

import pytest

from dllm.device_loop import Engine
from dllm.model.fast_decoder import FastDecoder
from tests.words import text_lm

HOW = {
    "given": dict(length=5),
    "window": dict(length_method="window", max_length=6),
    "score": dict(length_method="score", max_length=3),
}


class Counted(FastDecoder):
    """The fast decoder; counts its forwards."""

    forwards = 0

    def __call__(self, *args, **kwargs):
        type(self).forwards += 1
        return super().__call__(*args, **kwargs)


@pytest.fixture
def on_kernels(monkeypatch):
    # What the engine finds on CUDA, where nothing keeps it from the kernels; here they run as their references.
    monkeypatch.setattr(Engine, "_off", lambda self: None)
    monkeypatch.setattr("dllm.device_loop.FastDecoder", Counted)
    monkeypatch.setattr(Counted, "forwards", 0)


@pytest.mark.parametrize("options", HOW.values(), ids=HOW)
def test_every_forward_of_an_infill_is_one_of_the_engines_model(on_kernels, options):
    fill = text_lm().infill("the cab ", " abc.", **options)
    assert fill.stats.nfe == Counted.forwards > 0


@pytest.mark.parametrize("options", HOW.values(), ids=HOW)
def test_off_the_gpu_an_infill_runs_the_plain_model_and_gives_the_same(request, options):
    lm, forwards = text_lm(), []
    lm.model.register_forward_hook(lambda module, *_: forwards.append(module))
    plain = lm.infill("the cab ", " abc.", **options)
    assert forwards == [lm.model] * plain.stats.nfe
    request.getfixturevalue("on_kernels")
    fast = text_lm().infill("the cab ", " abc.", **options)
    assert (fast.texts, fast.lengths, fast.stats.nfe) == (plain.texts, plain.lengths, plain.stats.nfe)
