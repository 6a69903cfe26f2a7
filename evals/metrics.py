"""Metrics of outputs and of whole runs: exact match, ROUGE-L, edit similarity, accuracy and pass@k with intervals. No model, no files.

Intervals of an accuracy are Wilson's (1927), which stay sensible at 0 and 1, where a bootstrap has no width; those of pass@k
resample problems (`statistics.bootstrap_mean`), since samples of one problem are not independent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import NormalDist

from dllm.evals.statistics import Interval, bootstrap_mean

WORD = re.compile(r"[^\W_]+")


def exact_match(reference: str, output: str) -> float:
    """1.0 if both are the same text once runs of white space count as one blank and the ends are trimmed, else 0.0.

    An empty reference matches nothing: no output is an answer.
    """
    wanted = reference.split()
    return float(bool(wanted) and wanted == output.split())


def rouge_l(reference: str, output: str) -> float:
    """ROUGE-L F1 (Lin 2004, with beta = 1) over lower-cased words of letters and digits, not stemmed; in [0, 1].

    F1 of the longest common subsequence: 2 LCS / (words of one + words of the other); 0.0 where either has no word.
    """
    a, b = (WORD.findall(text.lower()) for text in (reference, output))
    return 2.0 * _longest_common_subsequence(a, b) / (len(a) + len(b)) if a and b else 0.0


def _longest_common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length, in len(a) * len(b) steps and one row of memory."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def edit_similarity(reference: str, output: str) -> float:
    """1 - Levenshtein distance / length of the longer text, in characters; ends trimmed; in [0, 1]. 0.0 for an empty reference."""
    a, b = reference.strip(), output.strip()
    if not a:
        return 0.0
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return 1.0 - row[-1] / max(len(a), len(b))


def accuracy(scores: Sequence[float], level: float = 0.95) -> Interval:
    """Share of ones with Wilson's score interval. scores: 0.0 or 1.0 a sample, at least one."""
    wrong = [score for score in scores if score not in (0.0, 1.0)]
    if not scores or wrong:
        raise ValueError(f"scores must be non-empty and 0 or 1: got {wrong[:3] if wrong else 'none'}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in (0, 1): got {level}")
    n, share = len(scores), sum(scores) / len(scores)
    z = NormalDist().inv_cdf(0.5 + level / 2.0)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At the ends the bound is the estimate itself, up to rounding.
    return Interval(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)), n, level)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement from those of one problem, passes.

    1 - C(n - c, k) / C(n, k): unbiased (Chen et al. 2021, arXiv:2107.03374, equation 1). Raises ValueError unless
    1 <= k <= num_samples and 0 <= num_passed <= num_samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be in [1, num_samples = {num_samples}]: got {k}")
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"num_passed must be in [0, num_samples = {num_samples}]: got {num_passed}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int, *, level: float = 0.95, seed: int = 0) -> Interval:
    """Mean of `pass_at_k` over problems, with a bootstrap interval over problems. counts: (samples, passed) a problem."""
    if not counts:
        raise ValueError("counts must hold at least one problem: got none")
    return bootstrap_mean([pass_at_k(n, c, k) for n, c in counts], level=level, seed=seed)
