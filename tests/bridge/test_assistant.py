"""Drafters in transformers' own assisted loop: the same text, with the passes that the drafts save."""

import json
from pathlib import Path

import pytest
import torch

from dllm import load_target
from dllm.bridge.assistant import DFlashAssistant, DraftCandidateGenerator
from dllm.drafters.drafter import Drafter
from dllm.speculate import speculative_generate
from tests.chi_squared import chi_squared_pvalue
from tests.speculative import Scripted, greedy_text, hf_target, prompts, random_drafter

GOLDEN = Path(__file__).parents[1] / "data" / "drafters"
GREEDY = dict(do_sample=False, pad_token_id=0)


def loaded(family):
    base = GOLDEN / "dflash" / "target"
    target = load_target(base, dtype="float32", device="cpu")
    options: dict = {"head_candidates": None} if family == "dfly" else {}
    trace = json.loads((GOLDEN / family / "traces.json").read_text())[0]
    return (
        target,
        Drafter.from_pretrained(GOLDEN / family / "draft", target, **options),
        torch.tensor([trace["prompt"]]),
    )


@pytest.mark.parametrize("family", ["dflash", "dflash_swa_scaled", "dfly"])
def test_the_stand_in_for_the_assistant_model_drafts_what_our_loop_drafts(family):
    target, drafter, ids = loaded(family)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, **GREEDY)
    expected = target.generate(**inputs)
    ours = speculative_generate(target, drafter, ids, max_new_tokens=40)
    assert max(ours.stats.accept_lengths) > 2
    assistant = DFlashAssistant(drafter, max_length=64)
    for _ in range(2):
        passes: list[int] = []
        handle = target.register_forward_hook(lambda *_, seen=passes: seen.append(1))
        got = target.generate(assistant_model=assistant, speculation_type="dflash", **inputs)
        handle.remove()
        assert got.tolist() == expected.tolist()
        # transformers 5.17 takes back a token at the length limit, which costs it a pass or two.
        assert ours.stats.nfe <= len(passes) <= ours.stats.nfe + 2
    assistant.close()


def test_what_the_contract_of_the_assistant_cannot_say_is_refused():
    target = hf_target()
    with pytest.raises(ValueError, match="a dflash2 selects among candidates"):
        DFlashAssistant(random_drafter("dflash2", target), 64)
    with pytest.raises(ValueError, match="target_layer_ids must not hold the last layer"):
        DFlashAssistant(random_drafter("dflash", target, taps=(0, 3)), 64)


class Loop:
    """A model whose assisted loop gets a candidate generator of ours; its dispatch is closed to third parties."""

    def __init__(self, target, generator):
        self.target, self.generator = target, generator

    def __enter__(self):
        self.target._get_candidate_generator = lambda **_: self.generator
        return self.target

    def __exit__(self, *error):
        del self.target._get_candidate_generator
        self.generator.close()


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dfly"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_candidate_generator_gives_generate_s_text_request_after_request(family, count):
    target, drafter, ids = loaded(family)
    inputs = dict(attention_mask=torch.ones_like(ids), max_new_tokens=30, prompt_lookup_num_tokens=2, **GREEDY)
    expected = target.generate(ids, **{**inputs, "prompt_lookup_num_tokens": None})
    with Loop(target, DraftCandidateGenerator(drafter, max_length=40, num_drafts=count)) as model:
        for _ in range(2):
            assert model.generate(ids, **inputs).tolist() == expected.tolist()


def test_a_known_text_is_accepted_block_by_block_and_a_padded_prompt_keeps_its_positions():
    target = hf_target(3)
    (row,) = prompts(3, (5,))
    text = greedy_text(target, row, 24)
    padded = torch.tensor([[0, 0, *row]])
    mask = torch.tensor([[0, 0, *[1] * len(row)]])
    drafter = Scripted(target, [text])
    passes = []
    handle = target.register_forward_hook(lambda *_: passes.append(1))
    with Loop(target, DraftCandidateGenerator(drafter, max_length=40)) as model:
        out = model.generate(padded, attention_mask=mask, max_new_tokens=24, prompt_lookup_num_tokens=2, **GREEDY)
    handle.remove()
    assert out[0, 2:].tolist() == text
    assert drafter.lengths_seen[:2] == [[5], [13]]
    assert len(passes) <= 1 + 3 + 1


@pytest.mark.parametrize("warm", [0.0, 1.0])
def test_sampled_candidates_keep_the_target_s_law(warm):
    target = hf_target(8, vocab_size=5)
    drafter = random_drafter("dfly", target, block_length=3)
    ids = torch.tensor([[1, 3]])
    torch.manual_seed(0)
    counts = torch.zeros(25)
    inputs = dict(attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=True, top_k=0, temperature=1.5)
    with Loop(target, DraftCandidateGenerator(drafter, 8, draft_temperature=warm, seed=1)) as model:
        for trial in range(600):
            model._get_candidate_generator().noise.seeds.fill_(trial)
            out = model.generate(ids, prompt_lookup_num_tokens=2, pad_token_id=0, **inputs)[0]
            counts[out[3] * 5 + out[4]] += 1
    logits = target(torch.tensor([[1, 3, a, b] for a in range(5) for b in range(5)])).logits.view(5, 5, 4, 5) / 1.5
    first = logits[0, 0, 1].softmax(-1)
    second, third = logits[:, 0, 2].softmax(-1), logits[:, :, 3].softmax(-1)
    law = (first[:, None, None] * second[:, :, None] * third).sum(0).flatten()
    assert chi_squared_pvalue(counts, law) > 0.01


def test_candidates_need_one_row_and_a_number_of_drafts_that_the_drafter_has():
    target = hf_target()
    drafter = random_drafter("dflash", target)
    with pytest.raises(ValueError, match=r"num_drafts must be in \[1, 7\]: got 8"):
        DraftCandidateGenerator(drafter, 20, num_drafts=8)
    generator = DraftCandidateGenerator(drafter, 20)
    with pytest.raises(ValueError, match="input_ids must be one row"):
        generator.get_candidates(torch.ones(2, 3, dtype=torch.int64))
    generator.close()
