"""The cache that caches nothing: every valid row, every step, nothing kept."""

import torch

from dllm.cache.none import NoCache
from tests.spy import Spy
from tests.tiny import tiny_lm


def test_every_valid_row_is_computed_in_every_step_and_none_is_written():
    lm, spy = tiny_lm(eos_token_ids=()), Spy(NoCache())
    ids, mask = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    lm.generate(input_ids=ids, attention_mask=mask, max_new_tokens=9, cache=spy, threshold=2.0)
    for forward in spy.forwards:
        assert forward.computed == [list(range(12)), list(range(10))]
        assert forward.written == [[], []]
        assert not forward.stored.any()
    assert len(spy.forwards) == 9
