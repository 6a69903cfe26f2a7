import random

import pytest
import torch

from dllm.evals.loops import loop_rate, loop_start, loops, truncate_at_loop

PHRASE = list(range(100, 108))


def brute_force_loops(tokens: list[int], n: int, times: int) -> bool:
    """Directly from the definition: some n-gram has `times` occurrences, each starting n or more after the one
    before.
    """
    for i in range(len(tokens) - n + 1):
        gram, found, at = tokens[i : i + n], 0, 0
        while at + n <= len(tokens):
            if tokens[at : at + n] == gram:
                found, at = found + 1, at + n
            else:
                at += 1
        if found >= times:
            return True
    return False


def test_three_occurrences_loop_and_two_do_not():
    assert loops([1, *PHRASE, 2, *PHRASE, 3, *PHRASE])
    assert not loops([1, *PHRASE, 2, *PHRASE, 3, *PHRASE[:-1]])
    assert loops([1, *PHRASE, 2, *PHRASE], times=2)


def test_ten_equal_tokens_are_no_loop_but_twenty_four_are():
    assert not loops([7] * 23)
    assert loops([7] * 24)


def test_short_outputs_never_loop():
    assert not loops([])
    assert not loops([1] * 7)


def test_tensors_count_by_value():
    assert loops(torch.tensor(PHRASE * 3))


@pytest.mark.parametrize("seed", range(30))
def test_the_rule_equals_a_direct_search_and_what_is_kept_never_loops(seed):
    draw = random.Random(seed)
    for _ in range(30):
        n, times = draw.randint(1, 4), draw.randint(2, 4)
        tokens = [draw.randint(0, 2) for _ in range(draw.randint(0, 40))]
        assert loops(tokens, n, times) == brute_force_loops(tokens, n, times)
        kept = truncate_at_loop(tokens, n, times)
        assert kept == tokens[: len(kept)]
        assert not brute_force_loops(kept, n, times)
        assert (kept == tokens) == (not loops(tokens, n, times))


def test_a_loop_begins_where_text_first_repeats():
    sentence = list(range(20))
    tokens = [50, 51, 52, *sentence, *sentence, *sentence, *sentence]
    assert loop_start(tokens) == 3 + 20
    assert truncate_at_loop(tokens) == [50, 51, 52, *sentence]
    assert loop_start(sentence) is None
    assert truncate_at_loop(sentence) == sentence


def test_the_loop_rate_is_the_share_of_looping_outputs():
    assert loop_rate([PHRASE * 3, PHRASE, [], [7] * 24]) == 0.5
    with pytest.raises(ValueError, match="outputs"):
        loop_rate([])


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="n must"):
        loops([1], n=0)
    with pytest.raises(ValueError, match="times must"):
        loops([1], times=1)
    with pytest.raises(TypeError):
        loops([[1, 2], [3, 4]])  # type: ignore[list-item]
