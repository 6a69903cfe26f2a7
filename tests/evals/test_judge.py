import math
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dllm.evals.judge import Judge

VOCAB = 37


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def samples():
    random = torch.Generator().manual_seed(1)

    def ids(length):
        return torch.randint(0, VOCAB, (length,), generator=random).tolist()

    lengths = [(1, 1), (9, 4), (2, 20), (17, 1), (5, 0), (1, 33), (30, 30), (3, 7)]
    return [ids(p) for p, _ in lengths], [ids(c) for _, c in lengths]


@torch.no_grad()
def one_token_at_a_time(model, context, continuation):
    total, ids = 0.0, list(context)
    for token in continuation:
        total += model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)[token].item()
        ids.append(token)
    return total


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_batch_of_ragged_samples_equals_the_loop_over_tokens(model, samples, batch_size):
    scores = Judge(model, batch_size).score(*samples)
    for score, context, continuation in zip(scores, *samples, strict=True):
        assert score.num_tokens == len(continuation)
        assert score.total == pytest.approx(one_token_at_a_time(model, context, continuation), abs=2e-5 * 30)
        if continuation:
            assert score.mean == pytest.approx(score.total / len(continuation))


def test_a_score_does_not_depend_on_what_stands_beside_it(model, samples):
    together = Judge(model, batch_size=8).score(*samples)
    for i, (context, continuation) in enumerate(zip(*samples, strict=True)):
        (alone,) = Judge(model).score([context], [continuation])
        assert alone.total == pytest.approx(together[i].total, abs=1e-4)


def test_a_model_that_cannot_skip_rows_of_the_head_scores_the_same(model, samples):
    class WholeLogits:
        training = False
        config = model.config
        get_input_embeddings = model.get_input_embeddings

        def forward(self, input_ids, attention_mask, use_cache):
            return SimpleNamespace(logits=model(input_ids, attention_mask=attention_mask).logits)

        __call__ = forward

    judge = Judge(WholeLogits())
    assert not judge.selects_rows
    assert Judge(model).selects_rows
    expected = [score.total for score in Judge(model).score(*samples)]
    assert [score.total for score in judge.score(*samples)] == pytest.approx(expected, abs=1e-4)


def test_an_empty_continuation_scores_nothing(model):
    (score,) = Judge(model).score([[1, 2]], [[]])
    assert (score.total, score.num_tokens, score.mean) == (0.0, 0, None)


def test_a_uniform_judge_gives_the_log_of_the_vocabulary(model):
    flat = LlamaForCausalLM(model.config).eval()
    torch.nn.init.zeros_(flat.lm_head.weight)
    (score,) = Judge(flat).score([[3]], [[4, 5, 6]])
    assert score.mean == pytest.approx(-math.log(VOCAB), abs=1e-6)


def test_bad_samples_are_named(model):
    judge = Judge(model)
    with pytest.raises(ValueError, match="pair up"):
        judge.score([[1]], [])
    with pytest.raises(ValueError, match="sample 1 has none"):
        judge.score([[1], []], [[1], [1]])
    with pytest.raises(ValueError, match=f"sample 0 holds {VOCAB}"):
        judge.score([[1]], [[VOCAB]])
    with pytest.raises(ValueError, match="64 positions: sample 0 has 65"):
        judge.score([[1] * 60], [[1] * 5])
    with pytest.raises(ValueError, match="batch_size"):
        Judge(model, batch_size=0)


def test_a_model_in_training_mode_is_refused(model):
    with pytest.raises(ValueError, match="eval mode"):
        Judge(LlamaForCausalLM(model.config).train())


def test_non_finite_logits_name_the_sample(model):
    broken = LlamaForCausalLM(model.config).eval()
    with torch.no_grad():
        broken.model.embed_tokens.weight[5] = float("nan")
    with pytest.raises(ValueError, match="finite: sample 1"):
        Judge(broken).score([[1], [5]], [[2], [2]])
