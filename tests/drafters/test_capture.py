"""A round of drafting and verification has fixed shapes and no host synchronisation: it can be captured in a CUDA graph."""

import pytest
import torch

from dllm.drafters.drafter import Context
from dllm.noise import STREAM_ACCEPT, CounterNoise
from dllm.samplers.processors import PrefixCounts, Processors
from dllm.samplers.verify import block_verification, chain_rejection, equality
from tests.drafters.toy import toy_drafter, toy_target

KINDS = ["dflash", "dflash2", "dfly"]
BATCH, DRAFTS = 3, 4


class Round:
    """Static inputs and one call that a graph can hold: draft, process a made-up target's rows, verify."""

    def __init__(self, kind, rule, device):
        target = toy_target(vocab=40).to(device)
        options = {"head_candidates": 6} if kind == "dfly" else {}
        self.drafter = toy_drafter(kind, target, windows=(4, None), causal=(False, True), **options).to(device)
        self.drafter.reset(BATCH, 64)
        self.rule, self.noise = rule, CounterNoise.for_rows(3, BATCH, device)
        self.table = torch.randn(40, 40, generator=torch.Generator().manual_seed(1)).to(device) * 2
        self.features = torch.zeros(BATCH, DRAFTS + 1, self.drafter.config.feature_width, device=device)
        self.valid = torch.zeros(BATCH, DRAFTS + 1, dtype=torch.bool, device=device)
        self.anchor = torch.zeros(BATCH, dtype=torch.int64, device=device)
        self.limits = torch.tensor([4, 3, 1], device=device)
        self.processors = Processors(
            temperature=0.8, top_k=20, top_p=0.95, presence_penalty=0.3, logit_bias={4: 1.0}, repetition_penalty=1.1
        )
        self.counts = PrefixCounts.of_prompt(self.anchor[:, None], self.valid[:, :1], 40)

    def step(self):
        draft = self.drafter.propose(
            Context(self.features, self.valid), self.anchor, DRAFTS, 1.0, self.noise, lengths=self.limits
        )
        rows = self.table[torch.cat([self.anchor[:, None], draft.tokens], 1)]
        law = self.processors.law(self.processors.adjust(rows, draft.tokens, self.counts))
        positions = self.drafter.lengths[:, None] + torch.arange(1, DRAFTS + 2, device=rows.device)
        uniform = self.noise.uniform(positions, self.drafter.lengths, STREAM_ACCEPT)
        verdict = self.rule(law, draft, uniform, self.limits)
        return draft.tokens, verdict.accepted, verdict.next_token

    def load(self, index):
        generator = torch.Generator().manual_seed(index)
        self.features.copy_(torch.randn(self.features.shape, generator=generator))
        counts = torch.randint(1, DRAFTS + 2, (BATCH, 1), generator=generator)
        self.valid.copy_(torch.arange(DRAFTS + 1) < counts)
        self.anchor.copy_(torch.randint(40, (BATCH,), generator=generator))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [chain_rejection, block_verification, equality])
def test_a_captured_round_equals_the_eager_one(kind, rule):
    eager, captured = Round(kind, rule, "cuda"), Round(kind, rule, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = captured.step()
    captured.drafter.reset(BATCH, 64)
    for index in range(6):
        for one in (eager, captured):
            one.load(index)
        graph.replay()
        expected = eager.step()
        assert [x.tolist() for x in outputs] == [x.tolist() for x in expected]
        assert captured.drafter.lengths.tolist() == eager.drafter.lengths.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_drafts_what_the_cpu_drafts(kind):
    results = []
    for device in ("cpu", "cuda"):
        one = Round(kind, chain_rejection, device)
        rounds = []
        for index in range(5):
            one.load(index)
            rounds.append([x.tolist() for x in one.step()])
        results.append(rounds)
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_a_batch_give_drafts_and_verdicts_of_fixed_shape(kind):
    one = Round(kind, chain_rejection, "cpu")
    for index in range(3):
        one.load(index)
        tokens, accepted, following = one.step()
        assert (tokens.shape, accepted.shape, following.shape) == ((BATCH, DRAFTS), (BATCH,), (BATCH,))
        assert (accepted <= one.limits).all() and (tokens < 40).all() and (following < 40).all()
