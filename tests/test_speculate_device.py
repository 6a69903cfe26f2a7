"""Draft-and-verify rounds on the device: the same tokens, reasons and counters as the host's loop, and clear refusals."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dllm.draft_cost import CostTable
from dllm.drafters.fast_drafter import fusion_weight
from dllm.drafters.target import Target
from dllm.kernels._launch import interpreted
from dllm.noise import CounterNoise
from dllm.samplers.processors import Processors
from dllm.speculate import speculative_generate
from dllm.speculate_device import Rounds, kept_rounds, refuses, rounds_for, speculate_on_device, supports
from dllm.speculate_loop import SpeculativeLoop
from dllm.speculate_request import SpeculateRequest
from tests.speculative import VOCAB, Scripted, greedy_text, hf_target, own_target, prompts, random_drafter

MODEL = own_target()
TARGET = Target.of(MODEL)
ROUNDS = Rounds(32)


def request_of(rows, new=13, drafts=7, eos=(), **changes):
    values = dict(num_drafts=drafts, eos_token_ids=tuple(eos), processors=Processors(eos_token_ids=tuple(eos)))
    return SpeculateRequest(rows, new, CounterNoise.for_rows(0, len(rows)), **(values | changes))


def by_host(target, drafter, request):
    loop = SpeculativeLoop(target, drafter, request)
    for _ in loop.run():
        pass
    return loop.result()


def same(a, b):
    assert a.tokens == b.tokens
    assert a.useful == b.useful and a.finish_reasons == b.finish_reasons
    for left, right in zip([a.stats, *a.row_stats], [b.stats, *b.row_stats], strict=True):
        for name in ("nfe", "draft_nfe", "useful_tokens", "positions", "accept_lengths"):
            assert getattr(left, name) == getattr(right, name), name


@pytest.mark.parametrize("kind", ["dflash", "dfly", None])
@pytest.mark.parametrize("lengths", [(5,), (3, 6, 4, 1)])
def test_tokens_reasons_and_counters_are_those_of_the_hosts_loop(kind, lengths):
    for seed in range(4):
        drafter = None if kind is None else random_drafter(kind, MODEL, seed=seed)
        # Few ids, so that a stop often comes inside a block.
        eos = (7, 21) if seed % 2 else ()
        request = request_of(prompts(seed, lengths), new=5 + 3 * seed, drafts=0 if kind is None else 7, eos=eos)
        same(speculate_on_device(TARGET, drafter, request, ROUNDS), by_host(TARGET, drafter, request))


@pytest.fixture
def scripted(monkeypatch):
    """A drafter that knows the text and errs where told, on the host's side and on the device's."""

    def build(texts, wrong):
        drafter = Scripted(MODEL, texts, wrong)

        def propose(self, anchor, limits, key_group, cos, sin):
            lengths = (key_group == 0).sum(dim=1)
            whole = self.drafter.texts
            assert torch.equal(anchor[limits > 0], whole.gather(1, lengths[:, None])[:, 0][limits > 0])
            # Rows whose drafts do not count may stand anywhere.
            positions = (lengths[:, None] + torch.arange(1, self.num_drafts + 1)).clamp(max=whole.shape[1] - 1)
            tokens = whole.gather(1, positions)
            return torch.where(torch.isin(positions, self.drafter.wrong), (tokens + 1) % VOCAB, tokens)

        monkeypatch.setattr("dllm.drafters.fast_drafter.FastDrafter.propose", propose)
        monkeypatch.setattr("dllm.drafters.fast_drafter.unfit", lambda drafter: None)
        monkeypatch.setattr("dllm.speculate_device.unfit_drafter", lambda drafter: None)
        return drafter

    return build


@cache
def long_texts():
    """The greedy texts of ``prompts(3)``, long enough for every case."""
    return [greedy_text(MODEL, row, 39) for row in prompts(3)]


@pytest.mark.parametrize("drafts", [1, 7])
@pytest.mark.parametrize("stops", [False, True])
def test_accepted_blocks_are_cut_at_stops_and_at_the_exact_length(scripted, drafts, stops):
    rows = prompts(3)
    texts = long_texts()
    for new, wrong in ((1, ()), (16, (9, 10, 15)), (17, range(3, 40, 4)), (23, ())):
        # The stop is a token of the first row's own text, a few places in.
        eos = (texts[0][len(rows[0]) + min(new - 1, 11)],) if stops else ()
        request = request_of(rows, new=new, drafts=drafts, eos=eos)
        truth = by_host(TARGET, scripted(texts, wrong), request)
        result = speculate_on_device(TARGET, scripted(texts, wrong), request, ROUNDS)
        same(result, truth)
        if not stops:
            assert all(len(tokens) == new for tokens in result.tokens)
            assert result.tokens == [text[len(row) : len(row) + new] for text, row in zip(texts, rows, strict=True)]
        if not wrong and new > 2 and not stops:
            assert max(result.stats.accept_lengths) == drafts + 1


@pytest.mark.parametrize("poll", [1, 3, 50])
def test_looking_seldom_changes_nothing(scripted, poll):
    rows = prompts(4)
    texts = [greedy_text(MODEL, row, 30) for row in rows]
    request = request_of(rows, new=14, eos=(texts[1][len(rows[1]) + 5],))
    truth = by_host(TARGET, scripted(texts, (8,)), request)
    same(speculate_on_device(TARGET, scripted(texts, (8,)), request, rounds_per_poll=poll), truth)


def test_a_bucket_is_built_once_and_one_request_leaves_nothing_to_the_next():
    rounds = Rounds(4)
    drafter = random_drafter("dfly", MODEL)
    for seed in range(3):
        request = request_of(prompts(seed, (9, 2)), new=11 - seed)
        same(speculate_on_device(TARGET, drafter, request, rounds), by_host(TARGET, drafter, request))
    assert len(rounds.built) == 1


def test_a_drafter_whose_weights_change_in_place_drafts_with_the_new_ones():
    rounds = Rounds(4)
    drafter = random_drafter("dfly", own_target(), seed=3)
    target = drafter.target
    request = request_of(prompts(2), new=12)
    speculate_on_device(target, drafter, request, rounds)
    other = random_drafter("dfly", own_target(), seed=4)
    for mine, new in zip(drafter.parameters(), other.parameters(), strict=True):
        mine.copy_(new)
    built = rounds_for(target, drafter, request, 4, rounds)
    assert len(rounds.built) == 2
    assert built.drafter is not None and torch.equal(built.drafter.fusion, fusion_weight(other))


def test_a_cost_table_decides_for_the_whole_batch():
    drafter = random_drafter("dflash", MODEL)

    def costs(verify):
        return CostTable(7, 2.0, plain_ms={1: 1.0, 4: 1.0}, verify_ms={1: 1.0, 4: verify}, draft_ms={1: 0.5, 4: 0.5})

    on, off = (request_of(prompts(0), cost_table=costs(verify)) for verify in (1.0, 3.0))
    assert speculate_on_device(TARGET, drafter, on, ROUNDS).stats.draft_nfe > 0
    result = speculate_on_device(TARGET, drafter, off, ROUNDS)
    assert result.stats.draft_nfe == 0
    same(result, by_host(TARGET, None, request_of(prompts(0), drafts=0)))


def test_a_law_that_is_not_finite_raises_with_row_and_round():
    model = own_target()
    target = Target.of(model)
    rows = prompts(0)
    # Only the second row's text gets to this token after its first round.
    text = greedy_text(model, rows[1], 6)
    model.embed_tokens.weight[text[len(rows[1]) + 2]] = float("nan")
    request = request_of(rows, drafts=0)
    with pytest.raises(ValueError, match="logits must be finite") as host:
        by_host(target, None, request)
    with pytest.raises(ValueError, match="logits must be finite") as device:
        speculate_on_device(target, None, request)
    assert str(device.value).split(",")[0] == str(host.value).split(",")[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"verifier": "rejection"}, "verifier rejection"),
        ({"processors": Processors(repetition_penalty=1.2)}, "logits processors"),
        ({"processors": Processors(min_new_tokens=3)}, "logits processors"),
        ({"find_stop": lambda row, ids, start: None}, "find_stop"),
        ({"policy": object()}, "policy"),
        ({"prefix_processor": object()}, "prefix_processor"),
        ({"draft_temperature": 0.5}, "drafts that are drawn"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
    ],
)
def test_what_the_device_cannot_run_is_named(changes, reason):
    request = replace(request_of(prompts(0)), **changes)
    drafter = random_drafter("dflash", MODEL)
    assert supports(TARGET, drafter, request) == reason
    with pytest.raises(ValueError, match=reason):
        speculate_on_device(TARGET, drafter, request)


def test_targets_and_drafters_of_other_kinds_are_named():
    request = request_of(prompts(0))
    foreign = Target.of(hf_target())
    assert supports(foreign, None, request) == "a Hugging Face target"
    assert supports(TARGET, random_drafter("dflash2", MODEL), request) == "a drafter of type DFlash2"
    windowed = random_drafter("dflash", MODEL, windows=(4, None))
    assert supports(TARGET, windowed, request) == "a drafter with a window"


def test_the_public_call_takes_the_device_only_where_it_gives_the_same(monkeypatch):
    drafter = random_drafter("dflash", MODEL)
    assert refuses(TARGET, drafter, request_of(prompts(0))) == "device cpu"
    plain = speculative_generate(MODEL, drafter, [prompts(0)[0]], max_new_tokens=9)
    monkeypatch.setattr("dllm.speculate.refuses", supports)
    taken = speculative_generate(MODEL, drafter, [prompts(0)[0]], max_new_tokens=9)
    assert len(kept_rounds(drafter.target).built) == 1
    assert taken.sequences.tolist() == plain.sequences.tolist()
    assert taken.stats.accept_lengths == plain.stats.accept_lengths
    seen: list[int] = []
    watched = {"callback_on_step_end": lambda model, step, *rest: seen.append(step)}
    speculative_generate(MODEL, drafter, [prompts(0)[0]], max_new_tokens=9, **watched)
    assert len(seen) > 1 and len(kept_rounds(drafter.target).built) == 1


def test_a_copy_of_a_drafter_has_captured_nothing():
    drafter = random_drafter("dflash", own_target())
    kept_rounds(drafter.target).built["bucket"] = object()  # type: ignore[assignment]
    assert not kept_rounds(deepcopy(drafter).target).built


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
def test_whole_rounds_on_the_kernels_give_the_hosts_tokens(monkeypatch):
    drafter = random_drafter("dfly", MODEL)
    request = request_of(prompts(1, (3,)), new=2, drafts=1)
    truth = by_host(TARGET, drafter, request)
    for name, module in list(sys.modules.items()):
        if name.startswith("dllm.") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    same(speculate_on_device(TARGET, drafter, request), truth)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dflash", "dfly", None])
def test_on_the_gpu_graphs_and_kernels_give_the_hosts_tokens(kind):
    model = own_target().cuda()
    target = Target.of(model)
    rounds = Rounds(16)
    for seed in range(4):
        rows = prompts(seed, (5,) if seed % 2 else (3, 6, 4, 1))
        request = request_of(rows, new=17, drafts=0 if kind is None else 7, eos=(7,))
        on_gpu = replace(request, noise=CounterNoise.for_rows(0, len(rows), "cuda"))
        there = None if kind is None else random_drafter(kind, own_target()).cuda()
        if there is not None:
            there._target = (target,)
        here = None if kind is None else random_drafter(kind, MODEL)
        result, truth = speculate_on_device(target, there, on_gpu, rounds), by_host(TARGET, here, request)
        assert result.tokens == truth.tokens and result.finish_reasons == truth.finish_reasons
    assert all(one.captured.graph is not None for one in rounds.built.values())


def test_captured_rounds_are_taken_on_cuda_unless_they_are_turned_off(monkeypatch):
    far: Any = SimpleNamespace(device=torch.device("cuda"))
    drafter: Any = object()
    request = request_of(prompts(0))
    monkeypatch.setenv("DLLM_CAPTURED_DRAFTS", "0")
    assert refuses(far, drafter, request) == "DLLM_CAPTURED_DRAFTS is 0"
    monkeypatch.delenv("DLLM_CAPTURED_DRAFTS")
    assert refuses(far, None, request) == "no drafter"
    monkeypatch.setenv("DLLM_CAPTURED_DRAFTS", "yes")
    with pytest.raises(ValueError, match="DLLM_CAPTURED_DRAFTS must be one of 1, 0: got 'yes'"):
        refuses(far, drafter, request)
