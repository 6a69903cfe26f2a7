"""BlockPilot: what it reads, what it refuses, and that both loops take it without a change of the text."""

from __future__ import annotations

import json

import pytest
import torch

from dllm import BlockPilot, speculative_generate
from dllm.samplers.block_pilot import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    BlockPilotConfig,
    PilotNetwork,
    parameters_of,
    pilot_features,
    published_config,
)
from dllm.types import BlockPolicy, PolicyState
from tests.speculative import TARGETS, greedy_text, padded, prompts, random_drafter
from tests.tiny import VOCAB, prompt, tiny_lm, tokens

SHAPE = BlockPilotConfig((1, 2, 4), "draft", ("hidden", "top_logits"), (6, 5), 8)


def pilot(shape=SHAPE, always=None, seed=0, head=None):
    """Random weights; ``always``: the place of the length that is named whatever is read."""
    torch.manual_seed(seed)
    network = PilotNetwork(shape)
    for parameter in network.parameters():
        parameter.data.normal_(0, float(parameter.dim() > 1))
    if always is not None:
        network.last.weight.data.zero_()
        network.last.bias.data.copy_(torch.eye(len(shape.lengths))[always])
    return BlockPilot(shape, network, head)


def state(hidden=None, top=None, default=8, remaining=100, total=None):
    one = torch.ones(1, dtype=torch.int64)
    return PolicyState(one, one * remaining, default, hidden=hidden, top_logits=top, total=total)


def test_it_is_a_block_policy():
    assert isinstance(pilot(), BlockPolicy)


def test_different_requests_get_different_lengths_and_the_same_request_the_same():
    torch.manual_seed(0)
    hidden, top = torch.randn(40, 6), torch.randn(40, 5).sort(descending=True).values
    mine = pilot()
    lengths = mine.choose(hidden, top)
    assert len(set(lengths.tolist())) > 1
    singles = [mine.next(state(hidden[b : b + 1], top[b : b + 1])) for b in range(40)]
    assert singles == lengths.tolist()


def test_logits_count_up_to_a_constant():
    hidden, top = torch.randn(3, 6), torch.randn(3, 5)
    torch.testing.assert_close(pilot_features(SHAPE, hidden, top), pilot_features(SHAPE, hidden, top + 7))


def test_a_draft_is_never_longer_than_the_drafters_block_nor_a_block_than_its_gap():
    hidden, top = torch.zeros(1, 6), torch.zeros(1, 5)
    assert pilot(always=2).next(state(hidden, top, default=3)) == 3
    denoising = BlockPilotConfig((4, 16), "denoise", SHAPE.features, SHAPE.sizes, 8)
    assert pilot(denoising, always=1).next(state(hidden, top, remaining=9, total=torch.tensor([40]))) == 9


def test_the_whole_vocabulary_comes_from_the_head():
    torch.manual_seed(0)
    shape = BlockPilotConfig((1, 2), "draft", ("logits",), (7,), 0)
    matrix = torch.randn(6, 7)
    mine = pilot(shape, head=lambda hidden: hidden @ matrix)
    hidden = torch.randn(4, 6)
    wanted = mine.network(torch.log_softmax(hidden @ matrix, -1)).argmax(-1) + 1
    assert mine.choose(hidden, None).tolist() == wanted.tolist()
    with pytest.raises(ValueError, match="head must be given"):
        BlockPilot(shape, PilotNetwork(shape))


def test_the_published_network_has_the_published_size():
    assert parameters_of(published_config(151936)) == 315_373_573
    for shape in (SHAPE, published_config(50, (1, 2)), BlockPilotConfig((1, 2), sizes=(6, 5), width=0)):
        assert parameters_of(shape) == sum(p.numel() for p in PilotNetwork(shape).parameters())


def test_what_is_saved_comes_back(tmp_path):
    mine = BlockPilot(SHAPE, pilot().network, training={"prompts": 3})
    mine.network.mean.fill_(0.25)
    mine.save_pretrained(tmp_path / "pilot")
    again = BlockPilot.from_pretrained(tmp_path / "pilot")
    hidden, top = torch.randn(20, 6), torch.randn(20, 5)
    assert again.config == SHAPE and again.training == {"prompts": 3}
    assert again.choose(hidden, top).tolist() == mine.choose(hidden, top).tolist()


def test_a_folder_that_holds_something_else_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=CONFIG_NAME):
        BlockPilot.from_pretrained(tmp_path)
    pilot().save_pretrained(tmp_path)
    text = (tmp_path / CONFIG_NAME).read_text()
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**json.loads(text), "lenghts": [1]}))
    with pytest.raises(ValueError, match="unknown field 'lenghts'"):
        BlockPilot.from_pretrained(tmp_path)
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**json.loads(text), "width": 9}))
    with pytest.raises(ValueError, match=f"{WEIGHTS_NAME} must hold"):
        BlockPilot.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lengths=(2, 1)), "lengths must be ascending"),
        (dict(lengths=()), "lengths must be ascending"),
        (dict(lengths=(0, 2)), "lengths must be ascending"),
        (dict(side="both"), "side must be"),
        (dict(features=("hidden", "hidden")), "features must be"),
        (dict(features=("hidden",)), "sizes must have one width a feature"),
        (dict(width=-1), "width must be"),
        (dict(width=0, residual=True), "residual needs width"),
        (dict(dropout=1.0), "dropout must be"),
    ],
)
def test_shapes_without_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        BlockPilotConfig(**{"sizes": (6, 5), **changes})


def test_missing_misshaped_and_non_finite_features_are_named():
    hidden, top = torch.zeros(1, 6), torch.zeros(1, 5)
    for given, message in [
        ((None, top), "reads hidden needs what the prefill gave"),
        ((hidden, None), "reads top_logits needs what the prefill gave"),
        ((hidden[:, :5], top), "hidden must be 6 wide"),
        ((hidden * float("nan"), top), "must be finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            pilot().next(state(*given))


def test_a_pilot_of_one_side_is_refused_on_the_other():
    shape = BlockPilotConfig((4, 8), "denoise", ("hidden",), (32,), 0)
    with pytest.raises(ValueError, match="side 'denoise'"):
        pilot(shape).next(state(torch.zeros(1, 32)))
    ids = [prompt(6)]
    drafting = pilot(BlockPilotConfig((4, 8), "draft", ("hidden",), (32,), 0))
    with pytest.raises(ValueError, match="got one of 'draft'"):
        tiny_lm("bidirectional").generate(input_ids=ids, block_length=drafting, max_new_tokens=8)
    with pytest.raises(ValueError, match="needs bidirectional attention: got block_causal"):
        tiny_lm("block_causal").generate(input_ids=ids, block_length=pilot(shape), max_new_tokens=8)


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_drafting_with_a_pilot_leaves_the_text_as_it_is_and_the_batch_as_its_rows(kind):
    target = TARGETS[kind](4)
    drafter = random_drafter("dfly", target)
    rows = prompts(4)
    shape = BlockPilotConfig((1, 2, 5), "draft", ("hidden",), (16,), 0)
    mine = pilot(shape)
    ids, mask = padded(rows)
    seen = []

    def note(model, step, timestep, kwargs):
        if step:
            seen.append((kwargs["rows"], kwargs["limits"].tolist()))

    options = dict(max_new_tokens=12, block_length=mine)
    out = speculative_generate(target, drafter, ids, mask, callback_on_step_end=note, **options)
    assert [r.tolist() for r in out.sequences] == [greedy_text(target, row, 12)[len(row) :] for row in rows]
    first = dict(zip(*seen[0], strict=True))
    assert len(set(first.values())) > 1, "the rows must differ for this test to say something"
    for b, row in enumerate(rows):
        alone = speculative_generate(target, drafter, [row], **options)
        assert alone.row_stats[0].accept_lengths == out.row_stats[b].accept_lengths
        assert alone.row_stats[0].positions == out.row_stats[b].positions


def test_a_pilot_that_always_says_one_length_equals_that_length_in_a_diffusion_model():
    lm, ids = tiny_lm("bidirectional"), [prompt(9)]
    shape = BlockPilotConfig((4, 6), "denoise", ("hidden", "top_logits"), (32, VOCAB), 0)
    for place, length in enumerate(shape.lengths):
        out = lm.generate(input_ids=ids, block_length=pilot(shape, place), max_new_tokens=20)
        assert tokens(out) == tokens(lm.generate(input_ids=ids, block_length=length, max_new_tokens=20))
