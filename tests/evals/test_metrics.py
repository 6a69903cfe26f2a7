import itertools
import math

import pytest

from dllm.evals.metrics import accuracy, edit_similarity, exact_match, mean_pass_at_k, pass_at_k, rouge_l


def test_exact_match_ignores_white_space_only():
    assert exact_match(" The flock  was\ngone. ", "The flock was gone.") == 1.0
    assert exact_match("The flock was gone.", "the flock was gone.") == 0.0
    assert exact_match("", "") == exact_match(" \n", "") == exact_match("a", "") == 0.0


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence():
    # Lin 2004, section 3: police killed the gunman / police kill the gunman / the gunman kill police.
    assert rouge_l("police killed the gunman", "police kill the gunman") == pytest.approx(3 / 4)
    assert rouge_l("police killed the gunman", "the gunman kill police") == pytest.approx(2 / 4)
    assert rouge_l("Police, KILLED the gunman!", "police killed the gunman") == 1.0
    assert rouge_l("a b c d", "a c") == pytest.approx(2 * 2 / 6)
    assert rouge_l("", "a") == rouge_l("a", "") == rouge_l("...", "...") == 0.0


def test_edit_similarity_is_one_minus_the_share_of_edits():
    assert edit_similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert edit_similarity("abc", " abc\n") == 1.0
    assert edit_similarity("abc", "") == edit_similarity("", "") == 0.0
    assert edit_similarity("abc", "xyz") == 0.0


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 2), (5, 5), (7, 1)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(n, c):
    passed = [i < c for i in range(n)]
    for k in range(1, n + 1):
        draws = list(itertools.combinations(passed, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_pass_at_k_stays_exact_for_many_samples():
    assert pass_at_k(1000, 1, 1) == pytest.approx(1e-3)
    assert math.isclose(pass_at_k(200, 199, 2), 1.0)
    for arguments, message in (((5, 1, 6), "k must be in"), ((5, 6, 1), "num_passed"), ((5, -1, 1), "num_passed")):
        with pytest.raises(ValueError, match=message):
            pass_at_k(*arguments)


def test_mean_pass_at_k_resamples_problems():
    found = mean_pass_at_k([(4, 4), (4, 0), (4, 2)], 1)
    assert found.estimate == pytest.approx(0.5) and found.n == 3 and found.low < 0.5 < found.high
    with pytest.raises(ValueError, match="at least one problem"):
        mean_pass_at_k([], 1)


def test_accuracy_has_wilson_s_interval():
    found = accuracy([1.0] * 8 + [0.0] * 2)
    # Wilson 1927 for 8 of 10 at 95 %.
    assert (found.estimate, found.n) == (0.8, 10)
    assert found.low == pytest.approx(0.4902, abs=1e-4) and found.high == pytest.approx(0.9433, abs=1e-4)
    none, everything = accuracy([0.0] * 20), accuracy([1.0] * 20)
    assert none.low == 0.0 and 0.1 < none.high < 0.2
    assert everything.high == 1.0 and 0.8 < everything.low < 0.9


def test_accuracy_takes_nothing_but_zeros_and_ones():
    for scores in ([], [0.5], [1.0, 2.0]):
        with pytest.raises(ValueError, match="scores must be non-empty and 0 or 1"):
            accuracy(scores)
    with pytest.raises(ValueError, match="level must be in"):
        accuracy([1.0], level=1.0)
