"""``model.generate(custom_generate=...)`` gives what ``model.generate`` gives; what cannot be honoured is refused by name."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from dllm.drafters.drafter import Drafter
from dllm.noise import CounterNoise
from dllm.speculate import speculative_generate
from dllm.speculate_targets import HuggingFaceRows
from tests.chi_squared import chi_squared_pvalue
from tests.speculative import (
    KINDS,
    VOCAB,
    Scripted,
    greedy_text,
    hf_target,
    own_target,
    padded,
    prompts,
    random_drafter,
)
from tests.words import byte_tokenizer

GREEDY = dict(do_sample=False, pad_token_id=0)
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"


class Counts(transformers.LogitsProcessor):
    """A processor of a user's own, a function of the prefix."""

    def __call__(self, ids, scores):
        return scores + (ids[:, -1:] % 3 == 1) * torch.arange(VOCAB)


class EndsOn(transformers.StoppingCriteria):
    """A criterion of a user's own: two even tokens in a row."""

    def __call__(self, ids, scores, **kwargs):
        return (ids[:, -1] % 2 == 0) & (ids[:, -2] % 2 == 0)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("batch", [1, 4])
def test_t19_custom_generate_says_what_generate_says(count, batch):
    for seed in range(25):
        seed = 25 * [0, 1, 2, 7].index(count) + seed + 100 * (batch == 4)
        target = hf_target(seed)
        drafter = random_drafter(KINDS[seed % 3], target, seed + 1)
        ids, mask = padded(prompts(seed)[:batch])
        inputs = dict(input_ids=ids, attention_mask=mask, max_new_tokens=9, eos_token_id=[3, 7, 11], **GREEDY)
        expected = target.generate(**inputs)
        got = target.generate(custom_generate=drafter.as_custom_generate(), num_drafts=count, **inputs)
        assert got.tolist() == expected.tolist(), seed


@pytest.mark.parametrize(
    "options",
    [
        dict(eos_token_id=[13, 5]),
        dict(eos_token_id=13, min_new_tokens=9),
        dict(eos_token_id=13, min_length=12),
        dict(eos_token_id=13, forced_eos_token_id=13),
        dict(eos_token_id=13, exponential_decay_length_penalty=(3, 1.5)),
        dict(repetition_penalty=1.4),
        dict(no_repeat_ngram_size=2),
        dict(bad_words_ids=[[13], [1, 5]]),
        dict(suppress_tokens=[3, 4], begin_suppress_tokens=[13]),
        dict(sequence_bias=[[[5], 2.0], [[7, 9], -3.0]]),
        dict(prefix_allowed_tokens_fn=lambda row, ids: [row + 1, 5, 6, 7, int(ids[-1])]),
        dict(logits_processor=transformers.LogitsProcessorList([Counts()])),
        dict(stopping_criteria=transformers.StoppingCriteriaList([EndsOn()]), eos_token_id=31),
        dict(max_length=21),
        dict(num_return_sequences=1, cache_implementation="dynamic"),
    ],
    ids=lambda options: "-".join(options),
)
def test_processors_and_criteria_of_generate_are_honoured_in_a_ragged_batch_and_alone(options):
    target = hf_target(2)
    drafter = random_drafter("dfly", target)
    rows = prompts(2)
    limit = {} if "max_length" in options else {"max_new_tokens": 18}
    for chosen in (rows, rows[:1], rows[3:]):
        ids, mask = padded(chosen)
        inputs = dict(input_ids=ids, attention_mask=mask, **GREEDY, **limit, **options)
        expected = target.generate(**inputs)
        assert target.generate(custom_generate=drafter.as_custom_generate(), **inputs).tolist() == expected.tolist()


def test_accepted_drafts_are_processed_on_the_prefix_that_they_make():
    target = hf_target(2)
    ids, mask = padded(prompts(2)[:1])
    inputs = dict(input_ids=ids, attention_mask=mask, max_new_tokens=30, repetition_penalty=1.3, **GREEDY)
    expected = target.generate(**inputs)
    callable_ = Scripted(target, expected.tolist()).as_custom_generate()
    assert target.generate(custom_generate=callable_, **inputs).tolist() == expected.tolist()
    assert callable_.stats.nfe == 1 + 4 and max(callable_.stats.accept_lengths) == 8


def test_stop_strings_end_a_row_with_the_token_that_completes_them():
    target = hf_target(1, vocab_size=64)
    tokenizer = byte_tokenizer()
    ids, mask = padded(prompts(1, (3, 5)))
    inputs = dict(input_ids=ids, attention_mask=mask, max_new_tokens=30, eos_token_id=63, **GREEDY)
    text = tokenizer.decode(target.generate(**inputs)[0, ids.shape[1] :])
    stop = text[5:8]
    expected = target.generate(stop_strings=[stop], tokenizer=tokenizer, **inputs)
    assert expected.shape[1] < ids.shape[1] + 30 or (expected[0] == 0).any()
    drafter = random_drafter("dflash", target)
    got = target.generate(
        custom_generate=drafter.as_custom_generate(tokenizer=tokenizer), stop_strings=[stop], **inputs
    )
    assert got.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        target.generate(custom_generate=drafter.as_custom_generate(stop_strings=stop), **inputs)


def test_sampling_follows_the_filtered_law_and_torch_s_seed():
    target = hf_target(4, vocab_size=5)
    drafter = random_drafter("dfly", target, block_length=3)
    ids = torch.tensor([[1, 3]]).expand(4000, -1)
    inputs = dict(input_ids=ids, max_new_tokens=2, do_sample=True, temperature=1.7, top_k=4, pad_token_id=0)
    generate = drafter.as_custom_generate(draft_temperature=1.0)
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        drawn.append(target.generate(custom_generate=generate, **inputs))
    assert torch.equal(drawn[0], drawn[1])
    logits = target(torch.tensor([[1, 3, t] for t in range(5)])).logits / 1.7
    logits = logits.masked_fill(logits < logits.topk(4).values[..., -1:], -torch.inf)
    law = (logits[0, 1].softmax(-1)[:, None] * logits[:, 2].softmax(-1)).flatten()
    counts = torch.bincount(drawn[0][:, 2] * 5 + drawn[0][:, 3], minlength=25)
    assert chi_squared_pvalue(counts, law) > 0.01
    seeded = [target.generate(custom_generate=generate, seed=s, **inputs) for s in (3, 3, 4)]
    assert torch.equal(seeded[0], seeded[1]) and not torch.equal(seeded[0], seeded[2])


def test_a_streamer_gets_the_prompt_and_the_new_ids_and_is_ended():
    class Streamer:
        def __init__(self):
            self.ids, self.ended = [], 0

        def put(self, value):
            self.ids += value.reshape(-1).tolist()

        def end(self):
            self.ended += 1

    target = hf_target()
    generate = random_drafter("dflash", target).as_custom_generate()
    streamer = Streamer()
    out = target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=9, custom_generate=generate, streamer=streamer)
    assert (streamer.ids, streamer.ended) == (out[0].tolist(), 1)


def test_the_output_object_of_generate_can_be_asked_for():
    target = hf_target()
    generate = random_drafter("dflash", target).as_custom_generate()
    inputs = dict(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=9, **GREEDY)
    expected = target.generate(return_dict_in_generate=True, **inputs)
    out = target.generate(return_dict_in_generate=True, custom_generate=generate, **inputs)
    assert type(out) is type(expected) and out.sequences.tolist() == expected.sequences.tolist()
    caches = [next(o[name] for name in ("cache", "past_key_values") if name in o) for o in (out, expected)]
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_beams=2), "num_beams must be one of"),
        (dict(guidance_scale=2.0), "logits processor UnbatchedClassifierFreeGuidanceLogitsProcessor cannot be applied"),
        (dict(output_scores=True, return_dict_in_generate=True), "output_scores must be one of"),
        (dict(use_cache=False), "use_cache must be True"),
        (dict(cache_implementation="static"), "layer 0 of its cache is a StaticLayer"),
        (dict(num_drafts=99), "num_drafts must be in"),
        (dict(verifier="block"), "verifier must be 'greedy'"),
        (dict(position_ids=torch.arange(6).expand(4, -1) + 1), "position_ids must count the tokens"),
        (dict(foo=3), "foo"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(options, message):
    target = hf_target()
    generate = random_drafter("dflash", target).as_custom_generate()
    ids, mask = padded(prompts())
    inputs = dict(input_ids=ids, attention_mask=mask, max_new_tokens=5, custom_generate=generate, pad_token_id=0)
    with pytest.raises(ValueError, match=message):
        target.generate(**inputs, **options)


def test_an_assistant_a_used_cache_another_model_and_unknown_settings_are_refused():
    target, other = hf_target(), hf_target(1)
    drafter = random_drafter("dflash", target)
    inputs = dict(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=5, custom_generate=drafter.as_custom_generate())
    with pytest.raises(ValueError, match="assistant_model cannot be honoured"):
        target.generate(assistant_model=other, **inputs)
    with pytest.raises(ValueError, match="drafter must be bound to this model"):
        other.generate(**inputs)
    used = DynamicCache(config=target.config)
    target(torch.tensor([[1, 2]]), use_cache=True, **{CACHE: used})
    with pytest.raises(ValueError, match="must be empty, as the taps of its tokens are gone: got 2 tokens"):
        target.generate(**{CACHE: used}, **inputs)
    with pytest.raises(TypeError, match="unknown argument 'temperature'; accepted"):
        drafter.as_custom_generate(temperature=1.0)


SLIDING: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, {"sliding_window": 6}),
    "gemma3": (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig,
        {"sliding_window": 5, "query_pre_attn_scalar": 8},
    ),
    "lfm2": (
        transformers.Lfm2ForCausalLM,
        transformers.Lfm2Config,
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "head_dim": None},
    ),
}


@pytest.mark.parametrize("family", sorted(SLIDING))
def test_sliding_and_convolution_layers_go_back_at_batch_1_and_are_refused_beyond(family):
    model_class, config_class, changes = SLIDING[family]
    if changes.get("head_dim", 8) is None:
        changes = {k: v for k, v in changes.items() if v is not None} | {"num_key_value_heads": 2}
    target = hf_target(3, model_class, config_class, **changes)
    (row,) = prompts(3, (9,))
    text = greedy_text(target, row, 30)
    ids, mask = padded([row])
    inputs = dict(input_ids=ids, attention_mask=mask, max_new_tokens=30, **GREEDY)
    assert target.generate(**inputs).tolist() == [text]
    for wrong in ((), range(100), range(0, 100, 3), (12, 13, 20, 31)):
        drafter = Scripted(target, [text], wrong)
        out = speculative_generate(target, drafter, [row], max_new_tokens=30)
        assert out.sequences.tolist() == [text[9:]]
        assert target.generate(custom_generate=drafter.as_custom_generate(), **inputs).tolist() == [text]
    with pytest.raises(
        ValueError, match=r"batch must be 1 for \w+: layer \d of its cache is a (DynamicSliding|LinearAtt)"
    ):
        speculative_generate(target, drafter, *padded(prompts(3)), max_new_tokens=5)


def test_a_recurrent_model_and_a_model_without_positions_are_refused_by_name():
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=4, state_size=4)
    mamba = transformers.MambaForCausalLM(config).eval()
    with pytest.raises(ValueError, match="model must not be recurrent: MambaForCausalLM"):
        speculative_generate(mamba, None, [[1, 2]], max_new_tokens=3)
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=4, n_head=2)
    bloom = transformers.BloomForCausalLM(config).eval()
    with pytest.raises(ValueError, match="batch must be 1 for BloomForCausalLM, whose forward takes no position_ids"):
        speculative_generate(bloom, None, [[1, 2], [3, 4]], max_new_tokens=3)


class Quantised(DynamicLayer):
    """Stands for every layer that cannot take rows back."""

    is_croppable = False


def test_a_cache_that_cannot_take_rows_back_is_refused_by_the_layer_s_name():
    target = hf_target()
    drafter = random_drafter("dflash", target)
    messages = ("layer 2 is a Quantised, which cannot", "batch must be 1 .* layer 2 of its cache is a Quantised")
    for batch, message in enumerate(messages, 1):
        cache = DynamicCache(config=target.config)
        cache.layers[2] = Quantised()
        inputs = dict(max_new_tokens=5, custom_generate=drafter.as_custom_generate(), **{CACHE: cache}, **GREEDY)
        with pytest.raises(ValueError, match=message):
            target.generate(torch.tensor([[1, 2, 3]] * batch), **inputs)


def test_a_static_cache_serves_one_row_where_it_can_be_cropped():
    target = hf_target(5)
    (row,) = prompts(5, (4,))
    text = greedy_text(target, row, 20)
    ids, mask = padded([row])
    inputs = dict(attention_mask=mask, max_new_tokens=20, cache_implementation="static", disable_compile=True, **GREEDY)
    generate = Scripted(target, [text], (9, 15)).as_custom_generate()
    croppable = transformers.StaticCache(config=target.config, max_cache_len=8).layers[0].is_croppable
    if not croppable:
        with pytest.raises(ValueError, match="layer 0 is a StaticLayer, which cannot"):
            target.generate(ids, custom_generate=generate, **inputs)
        return
    assert target.generate(ids, custom_generate=generate, **inputs).tolist() == [text]


def test_holes_of_rejected_rows_are_gathered_away(monkeypatch):
    monkeypatch.setattr("dllm.speculate_targets.SPARE_COLUMNS", 4)
    widths = []
    tidy = HuggingFaceRows.tidy

    def spy(self, bound):
        tidy(self, bound)
        assert self.mask.sum(1).max() == bound
        assert self.cache.get_seq_length() == self.mask.shape[1]
        widths.append(self.mask.shape[1] - bound)

    monkeypatch.setattr(HuggingFaceRows, "tidy", spy)
    target = hf_target(3)
    rows = prompts(3)
    texts = [greedy_text(target, row, 60) for row in rows]
    out = speculative_generate(target, Scripted(target, texts, range(0, 100, 4)), *padded(rows), max_new_tokens=60)
    assert out.sequences.tolist() == [text[len(row) :] for row, text in zip(rows, texts, strict=True)]
    assert 0 in widths and max(widths) <= 16


def test_a_windowed_layer_is_a_sliding_one_in_this_transformers():
    # The refusal at batch > 1 rests on this.
    assert issubclass(DynamicSlidingWindowLayer, DynamicLayer) and DynamicSlidingWindowLayer is not DynamicLayer


def test_a_drafter_of_our_decoder_cannot_enter_generate():
    drafter: Drafter = random_drafter("dflash", own_target())
    with pytest.raises(ValueError, match="drafter must be bound to this model"):
        hf_target().generate(torch.tensor([[1]]), max_new_tokens=2, custom_generate=drafter.as_custom_generate())


def test_seeds_are_one_a_row():
    target = hf_target(6)
    drafter = random_drafter("dfly", target)
    rows = prompts(6, (4, 4))
    options = dict(max_new_tokens=9, do_sample=True, top_k=0, custom_generate=drafter.as_custom_generate())
    batch = target.generate(torch.tensor(rows), seed=[5, 9], **options)
    for row, seed, got in zip(rows, (5, 9), batch.tolist(), strict=True):
        assert target.generate(torch.tensor([row]), seed=[seed], **options)[0].tolist() == got
    assert CounterNoise.for_rows(5, 2).seeds.tolist() == [5, 6]
