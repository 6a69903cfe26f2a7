"""Pearson's test of counts against a law, without SciPy."""

import torch
from torch import Tensor


def chi_squared_pvalue(counts: Tensor, law: Tensor) -> float:
    """Probability of counts [k] at least this far from ``law`` [k] (sums to 1; entries of 0 must not occur)."""
    expected = law.double() / law.double().sum() * counts.sum()
    assert not counts[expected == 0].any(), "an outcome of probability 0 occurred"
    kept = expected > 0
    statistic = ((counts.double() - expected)[kept].square() / expected[kept]).sum()
    freedom = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
