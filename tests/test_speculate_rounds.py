"""A round of the loop has fixed shapes and asks the device for nothing, so that it can be captured; the host may look seldom."""

import pytest
import torch

from dllm.drafters.drafter import Context
from dllm.drafters.target import Target
from dllm.noise import CounterNoise
from dllm.samplers.processors import Processors
from dllm.speculate import speculative_generate
from dllm.speculate_loop import SpeculativeLoop
from dllm.speculate_request import SpeculateRequest
from tests.speculative import KINDS, TARGETS, own_target, padded, prompts, random_drafter, tokens

DRAFTS = 5


def request(rule, device="cpu", limit=40, eos=(3, 7)):
    sampled: dict = dict(temperature=0.8, top_p=0.9, top_k=20) if rule != "greedy" else {}
    return SpeculateRequest(
        prompts=prompts(2),
        max_new_tokens=limit,
        noise=CounterNoise.for_rows(0, 4, device),
        processors=Processors(
            repetition_penalty=1.2, min_new_tokens=2, eos_token_ids=eos, logit_bias={2: 0.5}, **sampled
        ),
        num_drafts=DRAFTS,
        verifier=rule,
        draft_temperature=0.0 if rule == "greedy" else 1.0,
        eos_token_ids=eos,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["greedy", "rejection", "block", "equality"])
def test_a_round_asks_the_device_for_nothing(kind, rule):
    # Tensors without numbers: whoever looks into one raises.
    target = own_target().to("meta")
    drafter = random_drafter(kind, target).to("meta")
    loop = SpeculativeLoop(Target.of(target), drafter, request(rule, "meta"))
    loop.every_round = False
    loop._look = lambda *_: []  # type: ignore[method-assign]
    loop._prefill()
    for count in (DRAFTS, DRAFTS, 0, 0, 2, DRAFTS):
        assert loop._round(count) == []
        assert loop.state.out.shape == (4, 41) and loop.pending[-1].features.shape[:2] == (4, count + 1)
    with pytest.raises(RuntimeError):
        loop.state.lengths.max().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["greedy", "block"])
@pytest.mark.parametrize("every", [2, 8, 100])
def test_how_often_the_host_looks_changes_neither_text_nor_counts(kind, rule, every, monkeypatch):
    monkeypatch.setattr("dllm.speculate_loop.POLL_ROUNDS", every)
    target = own_target(5)
    results = []
    for every_round in (True, False):
        drafter = random_drafter(kind, target)
        loop = SpeculativeLoop(Target.of(target), drafter, request(rule, eos=tuple(range(12))))
        loop.every_round = every_round
        for _ in loop.run():
            pass
        results.append(loop.result())
    often, seldom = results
    assert often.tokens == seldom.tokens and often.finish_reasons == seldom.finish_reasons
    assert {"stop", "length"} >= set(often.finish_reasons) and len({len(row) for row in often.tokens}) > 1
    for a, b in zip(often.row_stats, seldom.row_stats, strict=True):
        assert (a.nfe, a.draft_nfe, a.positions, a.accept_lengths) == (
            b.nfe,
            b.draft_nfe,
            b.positions,
            b.accept_lengths,
        )
    # Passes that nobody needed any more are passes all the same.
    assert often.stats.nfe <= seldom.stats.nfe <= often.stats.nfe + every - 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(TARGETS))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_gpu_says_what_the_cpu_says(kind, temperature):
    outs = []
    for device in ("cpu", "cuda"):
        target = TARGETS[kind](3).to(device)
        drafter = random_drafter("dfly", target).to(device)
        options = dict(max_new_tokens=40, temperature=temperature, seed=5, eos_token_id=[3, 7])
        out = speculative_generate(target, drafter, *padded(prompts(3)), **options)
        plain = speculative_generate(target, None, *padded(prompts(3)), **options)
        outs.append([[tokens(o, b) for b in range(4)] for o in (out, plain)])
    assert outs[0] == outs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["greedy", "block"])
def test_a_captured_round_equals_the_eager_one(rule):
    target = own_target(3).to("cuda")
    loops = []
    for _ in range(2):
        loop = SpeculativeLoop(
            Target.of(target), random_drafter("dfly", target).to("cuda"), request(rule, "cuda", eos=())
        )
        loop.every_round = False
        loop._look = lambda *_: []  # type: ignore[method-assign]
        loop._prefill()
        # One round each, so that what is left to feed has the width of a block.
        loop._round(DRAFTS)
        loops.append(loop)
    eager, captured = loops
    # Every column may be read, so that one shape holds for all rounds.
    captured.bound = eager.bound = 64
    (left,) = captured.pending
    static = Context(left.features.clone(), left.valid.clone())

    def step():
        captured.pending = [static]
        captured._round(DRAFTS)
        (new,) = captured.pending
        static.features.copy_(new.features)
        static.valid.copy_(new.valid)
        captured.bound = 64

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    eager._round(DRAFTS)
    for _ in range(4):
        graph.replay()
        eager.bound = 64
        eager._round(DRAFTS)
    for name in ("out", "lengths", "produced", "anchor", "log", "positions"):
        assert getattr(captured.state, name).tolist() == getattr(eager.state, name).tolist(), name
