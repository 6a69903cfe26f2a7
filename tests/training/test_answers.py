"""Answers of the AR base: batched, ragged, equal to one row alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dllm.model.decoder import Decoder, DecoderConfig
from dllm.training import answers as module
from dllm.training.answers import MAX_OPENING, MIN_PART, answer_prompts, answered_documents, command, invent_prompts
from dllm.training.data import chat_frame, load_documents
from dllm.types import Attend
from tests.training.toy import toy_base, toy_tokenizer

STOPS = (2, 7, *range(30, 36))


def tiny_model() -> Decoder:
    torch.manual_seed(3)
    model = Decoder(DecoderConfig(40, 32, 48, 2, 4, 2, 8, 256, rope_theta=100.0))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def alone(model: Decoder, prompt: list[int], limit: int) -> list[int]:
    """Greedy decoding of one prompt without any store."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + limit:
            rows = torch.arange(len(ids))[None]
            hidden = model(torch.tensor([ids]), rows, None, Attend.causal(rows))
            ids.append(int(model.head(hidden[0, -1]).argmax()))
            if ids[-1] in STOPS:
                break
    return ids[len(prompt) :]


@pytest.mark.parametrize("max_cached_rows", [60, 150, 100_000])
def test_answers_equal_those_of_each_prompt_alone(monkeypatch, max_cached_rows: int) -> None:
    # Finished rows leave the batch within these few steps.
    monkeypatch.setattr(module, "LEAVE_EVERY", 4)
    model, rng = tiny_model(), np.random.default_rng(0)
    prompts = [rng.integers(8, 40, n).tolist() for n in (3, 17, 1, 9, 9, 30, 5, 12)]
    seen = []
    found = answer_prompts(
        model,
        prompts,
        STOPS,
        24,
        max_cached_rows=max_cached_rows,
        on_batch=lambda done, total: seen.append((done, total)),
    )
    assert found == [alone(model, prompt, 24) for prompt in prompts]
    assert len({len(a) for a in found}) > 2
    assert seen[-1] == (8, 8)


def test_a_temperature_samples_and_its_seed_repeats(monkeypatch) -> None:
    model, prompts = tiny_model(), [[9, 10, 11]] * 6
    first = answer_prompts(model, prompts, STOPS, 12, temperature=1.5, seed=1)
    assert first == answer_prompts(model, prompts, STOPS, 12, temperature=1.5, seed=1)
    assert first != answer_prompts(model, prompts, STOPS, 12, temperature=1.5, seed=2)
    assert len({tuple(a) for a in first}) > 1


def test_answers_that_loop_or_never_end_are_left_out() -> None:
    loop = list(range(10, 18)) * 3
    kept = answered_documents([[1]] * 4, [[5, 6, 2], [5, 6], [*loop, 2], []], STOPS)
    assert len(kept) == 1 and kept[0][0].tolist() == [1, 5, 6, 2] and kept[0][1] == 1


def test_parts_of_looping_and_unfinished_answers_stay_where_they_are_asked_for() -> None:
    words, loop = list(range(100, 100 + MIN_PART)), list(range(10, 18))
    answers = [[*words, *loop, *loop, *loop, 2], words, words[1:], [5, 6, 2]]
    kept = answered_documents([[1]] * 4, answers, STOPS, keep_parts=True)
    # The loop's first turn is said for the first time; nothing that is cut ends with a stop.
    assert [kept[i][0].tolist() for i in range(len(kept))] == [[1, *words, *loop], [1, *words], [1, 5, 6, 2]]


def test_invented_prompts_have_the_templates_frame_and_are_all_different() -> None:
    model = tiny_model()
    header, footer = [8, 9], [7, 10, 11]
    openings = [[20, 21, 22, 23, 24, 25], [26]]
    prompts = invent_prompts(model, openings, header, footer, 200, max_new_tokens=20, min_p=0.0, seed=3)
    assert 10 < len(prompts) <= 200 and len({tuple(p) for p in prompts}) == len(prompts)
    begun = 0
    for prompt in prompts:
        words = prompt[2:-3]
        assert prompt[:2] == header and prompt[-3:] == footer and words and 7 not in words
        assert len(words) <= MAX_OPENING + 19
        begun += words[:3] == [20, 21, 22]
    assert 0 < begun < len(prompts)
    assert prompts == invent_prompts(model, openings, header, footer, 200, max_new_tokens=20, min_p=0.0, seed=3)


def test_min_p_leaves_unlikely_tokens_out() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log().repeat(4000, 1)
    drawn = [module._pick(logits, 1.0, torch.Generator().manual_seed(0), p).bincount(minlength=3) for p in (0.0, 0.2)]
    assert drawn[0].min() > 300 and drawn[1][2] == 0
    assert drawn[1][0] / 4000 == pytest.approx(2 / 3, abs=0.03)


def test_the_chat_frame_surrounds_the_users_words() -> None:
    tokenizer = toy_tokenizer()
    header, footer = chat_frame(tokenizer)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    x = tokenizer.encode("x", add_special_tokens=False)
    assert [*header, *x, *footer] == tokenizer.encode(text, add_special_tokens=False)


def test_bad_lengths_are_named() -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be >= 1: got 0"):
        answer_prompts(tiny_model(), [[1]], STOPS, 0)
    with pytest.raises(ValueError, match="prompts must have 1 to 246 tokens each: got lengths 0 to 3"):
        answer_prompts(tiny_model(), [[1, 2, 3], []], STOPS, 10)


def test_the_command_answers_its_part_of_the_prompts(tmp_path: Path) -> None:
    base = toy_base(tmp_path / "base", "llama")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(f'{{"question": "{c}{c}"}}' for c in "abcdefgh"), encoding="utf-8")
    sizes = []
    for part in ("0/2", "1/2"):
        out = tmp_path / f"{part[0]}.npz"
        command(out, [f"{prompts}:6"], str(base), max_new_tokens=40, temperature=1.0, part=part, device="cpu", seed=4)
        assert out.is_file()
        with np.load(out) as archive:
            sizes.append(len(archive["prompt_lengths"]))
            assert len(archive["offsets"]) == sizes[-1] + 1
    # A random model stops at 1 token in 44 or so: some answers ended in time.
    assert 1 <= sum(sizes) <= 6
    full = max((0, 1), key=lambda i: sizes[i])
    found = load_documents(tmp_path / f"{full}.npz", toy_tokenizer())
    ids, prompt = found[0]
    assert toy_tokenizer().decode(ids[:prompt].tolist()).startswith("<|im_start|>u") and ids[-1] == 2
