"""The diffusion transformer: cached equals uncached, and the SUBS law."""

import pytest
import torch

from dllm.model.dit import DiT, DiTConfig, subs_log_probs
from dllm.types import Attend


def tiny(**changes):
    torch.manual_seed(0)
    values = (
        dict(vocab_size=20, hidden_size=32, num_layers=2, num_heads=4, conditioning_size=8, max_positions=32) | changes
    )
    model = DiT(DiTConfig(**values)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("adaptive", [True, False])
def test_blocks_over_a_store_equal_one_block_causal_pass(adaptive):
    model = tiny(adaptive=adaptive)
    ids = torch.randint(0, 20, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(12).expand(2, -1)
    want = model.head(model(ids, positions, None, Attend.block_causal(positions, 4)))
    store = model.new_store(2, 12)
    for start in range(0, 12, 4):
        rows = positions[:, start : start + 4]
        store.extent = start
        attend = Attend.block_causal(rows, 4, key_group=positions[:, :start] // 4)
        got = model.head(
            model(ids[:, start : start + 4], rows, store, attend, rows=rows, write=torch.ones_like(rows).bool())
        )
        torch.testing.assert_close(got, want[:, start : start + 4], atol=1e-5, rtol=1e-5)


def test_without_adaptation_there_is_no_modulation_and_no_noise_level():
    names = set(tiny(adaptive=False).state_dict())
    assert not [name for name in names if "modulation" in name or "noise_level" in name]


def test_embeds_take_the_mask_row_where_masked_whatever_the_id_says():
    model = tiny()
    ids, masked = torch.tensor([[3, 4, 19]]), torch.tensor([[False, True, False]])
    embeds = model.embed(ids, masked, 19)
    assert torch.equal(embeds[0, 1], model.embed_tokens.weight[19])
    assert torch.equal(embeds[0, 0], model.embed_tokens.weight[3])
    with pytest.raises(ValueError, match="mask_token_id must be given"):
        model.embed(ids, masked)


def test_taps_are_the_residual_streams_after_the_layers():
    model = tiny()
    ids, positions = torch.tensor([[1, 2, 3]]), torch.arange(3)[None]
    attend = Attend.bidirectional(torch.ones(1, 3, dtype=torch.bool))
    hidden, tapped = model(ids, positions, None, attend, taps=(0, 1))
    assert torch.equal(hidden, model(ids, positions, None, attend))
    assert [t.shape for t in tapped] == [(1, 3, 32)] * 2
    with pytest.raises(ValueError, match="exactly one of ids and embeds"):
        model(ids, positions, None, attend, embeds=model.embed(ids))


def test_the_subs_law_rules_out_the_mask_and_carries_fixed_tokens_over():
    logits = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(2))
    logits[..., 5] = 30.0
    ids = torch.tensor([[5, 2, 5, 0]])
    law = subs_log_probs(logits, ids, 5).exp()
    torch.testing.assert_close(law.sum(-1), torch.ones(1, 4))
    assert float(law[..., 5].max()) == 0.0
    assert law[0, 1].tolist() == [0, 0, 1, 0, 0, 0]
    torch.testing.assert_close(law[0, 0, :5], logits[0, 0, :5].softmax(-1))


def test_an_impossible_shape_is_named():
    with pytest.raises(ValueError, match="hidden_size must be a multiple of 2 \\* num_heads = 8: got 12"):
        DiTConfig(vocab_size=4, hidden_size=12, num_layers=1, num_heads=4, conditioning_size=4, max_positions=4)
    with pytest.raises(ValueError, match="num_layers must be >= 1"):
        DiTConfig(vocab_size=4, hidden_size=8, num_layers=0, num_heads=4, conditioning_size=4, max_positions=4)
