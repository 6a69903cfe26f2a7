"""The loop's hook: what a decision may do, what is counted, and the pieces that hooks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm import S2D2, ARGuide, SimSD
from dllm.hooks import CausalRun, Decision, until_stop
from dllm.registry import hook_starter
from dllm.samplers.guided import Guided
from dllm.types import Attend
from tests.tiny import FILLER, MASK, padded, prompt, tiny_decoder, tiny_lm, tokens


class Greedy:
    """A hook that commits what it is told, and remembers what it was shown."""

    extends = False
    needs = frozenset({"top1", "entropy"})

    def __init__(self, loop, token):
        self.loop, self.token, self.kept = loop, token, []
        self.entropies = []

    def select(self, keep):
        self.kept.append(keep.tolist())

    def decide(self, proposal):
        self.entropies.append(proposal.laws.entropy)
        assert (proposal.offered <= proposal.masked).all()
        tokens = torch.full_like(proposal.laws.token, self.token)
        return Decision(tokens, torch.ones_like(proposal.offered), torch.ones_like(proposal.laws.confidence))


class Starter:
    def __init__(self, token):
        self.token = token

    def start(self, loop):
        self.hook = Greedy(loop, self.token)
        return self.hook


def test_a_hook_decides_what_is_committed_among_the_offered_slots_and_gets_what_it_needs():
    lm, starter = tiny_lm(eos_token_ids=()), Starter(7)
    out = lm.generate(**padded([prompt(3), prompt(9)]), max_new_tokens=13, verifier=starter)
    assert out.sequences.tolist() == [[7] * 13] * 2
    assert starter.hook.entropies[0] is not None
    assert starter.hook.kept == [] or starter.hook.kept[-1] == []


def test_a_hook_that_commits_a_mask_is_caught():
    with pytest.raises(ValueError, match="committed a mask or banned token in row 0, step 1"):
        tiny_lm().generate(input_ids=[prompt(3)], max_new_tokens=8, verifier=Starter(MASK))


def test_a_causal_run_over_ragged_rows_gives_the_states_of_whole_passes():
    model = tiny_decoder(1)
    run = CausalRun(model, 2, 12)
    text = torch.tensor([prompt(10), prompt(10, 1)])
    start = torch.tensor([0, 0])
    for lengths in ([3, 5], [4, 1], [2, 4]):
        stop = start + torch.tensor(lengths)
        at = start[:, None] + torch.arange(max(lengths))
        valid = at < stop[:, None]
        found = run.forward(text.gather(1, at.clamp(max=9)), start, valid)
        for b in range(2):
            length = int(stop[b])
            place = torch.arange(length)[None]
            whole = model(text[b : b + 1, :length], place, None, Attend.causal(place))[0]
            assert torch.allclose(found[b, : lengths[b]], whole[int(start[b]) :], atol=1e-5)
        # The last token of each row was a draft that does not stand.
        start = stop - 1


def test_a_stop_ends_what_is_committed():
    eos = torch.tensor([2])
    text = torch.tensor([[2, 5, 2, 6], [5, 6, 7, 8], [2, 2, 2, 2]])
    count, first = torch.tensor([3, 4, 0]), torch.tensor([1, 0, 2])
    assert until_stop(text, count, first, eos).tolist() == [2, 4, 0]


@pytest.mark.parametrize("cache", ["none", "block", "dual"])
def test_guides_and_verifiers_stream_the_text_that_they_generate(cache):
    lm = tiny_lm(eos_token_ids=())
    for options in (
        {"guide": ARGuide(tiny_decoder(1), rule=Guided("exact", "ar"))},
        {"verifier": "s2d2"},
        {"verifier": "free_dave"},
        {"verifier": SimSD(1)},
    ):
        seen: list[int] = []

        def note(model, step, number, kwargs, seen=seen):
            seen.append(int(kwargs["transfer_index"].sum()))

        out = lm.generate(input_ids=[prompt(4)], max_new_tokens=11, cache=cache, callback_on_step_end=note, **options)
        assert sum(seen) == out.stats.useful_tokens == 11
        assert MASK not in tokens(out)


def test_verifiers_fill_gaps_of_block_causal_models_as_rank_order_has_them():
    """S2D2 sees prefix and suffix; its always-verified text depends on both."""
    from dllm.canvas import infill_canvas
    from dllm.denoise import denoise
    from tests.tiny import loop_request

    lm = tiny_lm(eos_token_ids=())
    texts = []
    for suffix in (prompt(4, 1), prompt(4, 2)):
        canvas = infill_canvas([[prompt(5), suffix]], [[6]], lm.spec, "cpu")
        request = loop_request(canvas, lm.spec, hook=hook_starter(S2D2(-float("inf"))))
        texts.append(denoise(lm.model, request).canvas[0][5:11])
    assert MASK not in texts[0]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("first_slot", "rule", "cache"),
    [
        ("commit_first", "block_causal", "block"),
        ("commit_store_pass", "block_causal", "block"),
        ("commit_full_pass", "bidirectional", "dual"),
    ],
)
@pytest.mark.parametrize("origin", ["zero", "prompt"])
def test_what_is_exact_is_so_for_every_way_to_a_blocks_first_slot(first_slot, rule, cache, origin):
    lm = tiny_lm(rule, first_slot=first_slot, eos_token_ids=(), block_origin=origin)
    options: dict[str, Any] = {"input_ids": [prompt(6)], "max_new_tokens": 14, "cache": cache}
    causal = tiny_decoder(1)
    guided = lm.generate(**options, guide=ARGuide(causal, rule=Guided("exact", "ar")))
    text = prompt(6)
    while len(text) < 20:
        at = torch.arange(len(text))[None]
        logits = causal.head(causal(torch.tensor([text]), at, None, Attend.causal(at))[0, -1]).clone()
        logits[[MASK, FILLER]] = -torch.inf
        text.append(int(logits.argmax()))
    assert tokens(guided) == text[6:]
    plain = lm.generate(**options, threshold=0.9)
    assert tokens(lm.generate(**options, threshold=0.9, verifier="free_dave")) == tokens(plain)
    if rule == "block_causal":
        view = lm.generate(**options, verifier=S2D2(-float("inf")))
        assert tokens(lm.generate(**options, verifier=SimSD(1, exact=True))) == tokens(view)
