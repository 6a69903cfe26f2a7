"""The draft-and-verify loop gives the target's own text and law, whatever drafts, verifier, batch and kind of target."""

import json
from pathlib import Path

import pytest
import torch

from dllm import load_target
from dllm.drafters.config import DraftConfig
from dllm.drafters.dfly import DFly
from dllm.drafters.drafter import Drafter
from dllm.drafters.target import Target
from dllm.evals.parity_drafters import trace_case
from dllm.families.loading import load_checkpoint
from dllm.model.decoder import DecoderConfig
from dllm.samplers.processors import PrefixCounts, Processors
from dllm.speculate import speculative_generate
from tests.chi_squared import chi_squared_pvalue
from tests.drafters.toy import toy_drafter, toy_target
from tests.speculative import KINDS, TARGETS, Scripted, greedy_text, padded, prompts, random_drafter, tokens

GOLDEN = Path(__file__).parent / "data" / "drafters"
LIMIT = 10


@pytest.mark.parametrize("kind", sorted(TARGETS))
@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("batch", [1, 4])
def test_t19_a_random_drafter_never_changes_the_greedy_text_of_a_random_target(kind, count, batch):
    # 200 seeds in all for each kind of target.
    for seed in range(25):
        seed = 25 * [0, 1, 2, 7].index(count) + seed + 100 * (batch == 4)
        target = TARGETS[kind](seed)
        drafter = random_drafter(KINDS[seed % 3], target, seed + 1)
        rows = prompts(seed)[:batch]
        expected = [greedy_text(target, row, LIMIT)[len(row) :] for row in rows]
        ids, mask = padded(rows, "left" if seed % 2 else "right")
        out = speculative_generate(target, drafter, ids, mask, max_new_tokens=LIMIT, num_drafts=count)
        assert out.sequences.tolist() == expected, seed
        assert [sum(s.accept_lengths) for s in out.row_stats] == [LIMIT - 1] * batch
        assert (out.stats.draft_nfe > 0) == (count > 0)


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_without_a_drafter_the_loop_decodes_plainly(kind):
    target = TARGETS[kind](1)
    rows = prompts(1)
    out = speculative_generate(target, None, *padded(rows), max_new_tokens=LIMIT)
    assert out.sequences.tolist() == [greedy_text(target, row, LIMIT)[len(row) :] for row in rows]
    assert (out.stats.nfe, out.stats.draft_nfe) == (LIMIT, 0)
    assert out.stats.positions == sum(map(len, rows)) + 4 * (LIMIT - 1)


@pytest.mark.parametrize("kind", sorted(TARGETS))
@pytest.mark.parametrize(
    "wrong", [(), range(100), range(0, 100, 3), (9, 10, 23, 24)], ids=["never", "always", "third", "some"]
)
def test_accepted_and_rejected_drafts_leave_the_same_text_and_the_counts_say_how_many(kind, wrong):
    target = TARGETS[kind](3)
    rows = prompts(3)
    texts = [greedy_text(target, row, 30) for row in rows]
    drafter = Scripted(target, texts, wrong)
    ids, mask = padded(rows)
    batch = speculative_generate(target, drafter, ids, mask, max_new_tokens=30)
    for b, (row, text) in enumerate(zip(rows, texts, strict=True)):
        assert tokens(batch, b) == text[len(row) :]
        place, expected = len(row), []
        while place + 1 < len(text):
            # Drafts up to the first wrong position, one more token, never past the limit.
            right = next((k for k in range(7) if place + 1 + k in wrong), 7)
            expected.append(min(right + 1, len(text) - 1 - place))
            place += expected[-1]
        assert batch.row_stats[b].accept_lengths == expected
        alone = Scripted(target, [text], wrong)
        single = speculative_generate(target, alone, [row], max_new_tokens=30)
        assert tokens(single) == tokens(batch, b)
        for name in ("nfe", "draft_nfe", "positions", "accept_lengths", "useful_tokens"):
            assert getattr(single.row_stats[0], name) == getattr(batch.row_stats[b], name), name
        # The drafter holds exactly what was committed before the anchor.
        anchors = [len(row) + sum(expected[:k]) for k in range(len(expected))]
        assert alone.lengths_seen == [[place] for place in anchors]
    assert batch.stats.nfe == max(s.nfe for s in batch.row_stats)
    assert batch.stats.positions == sum(s.positions for s in batch.row_stats)
    assert batch.stats.accept_lengths == [n for s in batch.row_stats for n in s.accept_lengths]


@pytest.mark.parametrize("family", ["dflash", "dflash_swa_scaled", "dflash2", "dfly"])
def test_golden_traces_hold_on_our_decoder_too(family):
    folder = GOLDEN / family
    base = folder / "target" if (folder / "target").is_dir() else GOLDEN / "dflash" / "target"
    own, *_ = load_checkpoint(base, dtype="float32", device="cpu")
    options: dict = {"head_candidates": None} if family == "dfly" else {}
    drafter = Drafter.from_pretrained(folder / "draft", own, **options)
    for trace in json.loads((folder / "traces.json").read_text()):
        assert trace_case(drafter, trace).status == "ok", trace["name"]


@pytest.mark.parametrize("kind", sorted(TARGETS))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verifier", ["rejection", "block", "equality"])
@pytest.mark.parametrize("warm", [0.0, 0.9], ids=["argmax-drafts", "sampled-drafts"])
def test_t20_a_row_of_a_ragged_batch_equals_its_single_run(kind, temperature, verifier, warm):
    if temperature == 0:
        verifier = "greedy"
    target = TARGETS[kind](5)
    drafter = random_drafter("dfly" if warm else "dflash", target)
    rows = prompts(5)
    ids, mask = padded(rows, "right")
    options = dict(
        max_new_tokens=17,
        temperature=temperature,
        verifier=verifier,
        draft_temperature=warm,
        eos_token_id=[3, 20, 31],
        repetition_penalty=1.2,
        min_new_tokens=2,
        **({"top_p": 0.95} if temperature else {}),
    )
    batch = speculative_generate(target, drafter, ids, mask, seed=11, **options)
    assert len(set(batch.lengths)) > 1
    for b, row in enumerate(rows):
        single = speculative_generate(target, drafter, [row], seed=11 + b, **options)
        assert tokens(single) == tokens(batch, b)
        assert single.finish_reasons[0] == batch.finish_reasons[b]
        assert single.stats.accept_lengths == batch.row_stats[b].accept_lengths
        assert single.stats.nfe == batch.row_stats[b].nfe
        assert single.stats.positions == batch.row_stats[b].positions


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_with_the_equality_rule_the_sampled_text_is_that_of_plain_sampling(kind):
    target = TARGETS[kind](6)
    rows = prompts(6)
    ids, mask = padded(rows)
    options = dict(max_new_tokens=20, temperature=1.0, seed=3)
    plain = speculative_generate(target, None, ids, mask, **options)
    texts = [row + tokens(plain, b) for b, row in enumerate(rows)]
    # A drafter that knows the sampled text is believed, one that does not changes nothing.
    for wrong, passes in (((), 3), (range(100), 19)):
        drafter = Scripted(target, texts, wrong)
        out = speculative_generate(target, drafter, ids, mask, verifier="equality", **options)
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert [s.nfe for s in out.row_stats] == [passes + 1] * 4


# The law


def exact_law(target, prompt, processors, length):
    """Probability of every continuation of ``length`` tokens: [V ** length]."""
    vocab = target.config.vocab_size
    paths = torch.cartesian_prod(*[torch.arange(vocab)] * length).view(-1, length)
    ids = torch.cat([torch.tensor(prompt).expand(len(paths), -1), paths], dim=1)
    logits, _ = Target.of(target).read(ids, [0])
    counts = PrefixCounts.of_prompt(
        torch.tensor(prompt).expand(len(paths), -1), torch.ones(len(paths), len(prompt), dtype=torch.bool), vocab
    )
    law = processors.law(processors.adjust(logits[:, len(prompt) - 1 : -1], paths[:, :-1], counts))
    return law.gather(2, paths[..., None]).squeeze(-1).prod(1)


@pytest.mark.parametrize("verifier", ["rejection", "block", "equality"])
@pytest.mark.parametrize(
    ("kind", "warm"), [("dflash", 0.0), ("dflash", 1.0), ("dflash2", 1.3), ("dfly", 0.0), ("dfly", 1.0)]
)
def test_t19_sampled_text_has_the_target_s_law_for_every_head_and_verifier(kind, warm, verifier):
    target = toy_target(5, 4, seed=8)
    target.lm_head.weight.mul_(0.7)
    drafter = toy_drafter(kind, target, seed=4)
    prompt, draws = [1, 3], 3000
    settings: dict = dict(temperature=1.2, top_p=0.97, frequency_penalty=0.4, logit_bias={2: 0.5})
    out = speculative_generate(
        target,
        drafter,
        [prompt],
        num_return_sequences=draws,
        max_new_tokens=3,
        num_drafts=2,
        verifier=verifier,
        draft_temperature=warm,
        seed=1000,
        **settings,
    )
    assert out.stats.draft_nfe > 0 and max(out.stats.accept_lengths) == 2
    index = (out.sequences * torch.tensor([25, 5, 1])).sum(1)
    law = exact_law(target, prompt, Processors(**settings), 3)
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)
    assert chi_squared_pvalue(torch.bincount(index, minlength=125), law) > 0.01


def test_smollm2_with_a_random_drafter_says_what_generate_says():
    try:
        target = load_target("smollm2-135m", dtype="float32", device="cpu")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    body = DecoderConfig(49152, 576, 256, 1, 9, 3, 64, 8192, qk_norm=True, tie_embeddings=True)
    config = DraftConfig("dfly", "angelspec", body, (1, 14, 26), 16, 4, (None,), (False,), 576, 30, correction_width=64)
    drafter = DFly(config, target).eval().requires_grad_(False)
    tokenizer = target.tokenizer
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in ("What is the capital of France?", "Count from one to ten.", "Write a haiku about rain.")
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    expected = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    fast = target.generate(
        **inputs, max_new_tokens=24, do_sample=False, custom_generate=drafter.as_custom_generate(num_drafts=2)
    )
    assert fast.tolist() == expected.tolist()
    out = speculative_generate(target, drafter, **inputs, max_new_tokens=24)
    new = expected[:, inputs["input_ids"].shape[1] :]
    for b, row in enumerate(new.tolist()):
        end = row.index(2) if 2 in row else len(row)
        assert tokens(out, b) == row[:end]
