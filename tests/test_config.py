"""GenerationConfig: one name for each thing, and an error for whatever is unknown, contradictory or of no effect."""

import pytest
from transformers import GenerationConfig as HFGenerationConfig

from dllm.config import ALIASES, GenerationConfig
from dllm.noise import CounterNoise


def of(**kwargs):
    return GenerationConfig.from_kwargs(kwargs)


ALIAS_VALUES = {
    "max_new_tokens": 7,
    "max_denoising_steps": 3,
    "sampler": "low_confidence",
    "noise": CounterNoise.for_rows(0, 1),
    "eos_token_id": 5,
    "stop_strings": "x",
}


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_an_alias_sets_the_field_that_it_stands_for(alias):
    name = ALIASES[alias]
    assert getattr(of(**{alias: ALIAS_VALUES[name]}), name) is ALIAS_VALUES[name]


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_an_alias_beside_its_field_clashes_even_with_the_same_value(alias):
    name = ALIASES[alias]
    with pytest.raises(TypeError, match=f"{name}.*{alias}|{alias}.*{name}"):
        of(**{alias: ALIAS_VALUES[name], name: ALIAS_VALUES[name]})


def test_two_aliases_of_one_field_clash():
    with pytest.raises(TypeError, match="max_new_tokens"):
        of(gen_length=5, max_tokens=5)


def test_steps_in_all_and_steps_per_block_clash():
    with pytest.raises(ValueError, match="max_denoising_steps.*steps"):
        of(steps=8, max_denoising_steps=4)
    with pytest.raises(ValueError, match="max_denoising_steps.*steps"):
        of(steps=8, num_inference_steps=4)


def test_seed_and_noise_clash():
    with pytest.raises(ValueError, match="seed and noise"):
        of(seed=1, noise=CounterNoise.for_rows(0, 1))


def test_names_that_are_no_field_wait_in_options_for_sampler_and_cache():
    assert of(threshold=0.5, freeze_delay=1, foo=2).options == {"threshold": 0.5, "freeze_delay": 1, "foo": 2}


def test_arguments_of_the_call_win_over_a_config_and_leave_it_as_it_was():
    base = of(max_new_tokens=9, temperature=0.5, threshold=0.7)
    config = GenerationConfig.from_kwargs({"gen_length": 3, "threshold": 0.8}, base)
    assert (config.max_new_tokens, config.temperature, config.options) == (3, 0.5, {"threshold": 0.8})
    assert (base.max_new_tokens, base.options) == (9, {"threshold": 0.7})


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"max_new_tokens": "16"}, TypeError),
        ({"max_new_tokens": 16.0}, TypeError),
        ({"max_new_tokens": True}, TypeError),
        ({"max_new_tokens": None}, TypeError),
        ({"max_new_tokens": -1}, ValueError),
        ({"min_new_tokens": -1}, ValueError),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, ValueError),
        ({"num_return_sequences": 0}, ValueError),
        ({"max_denoising_steps": 0}, ValueError),
        ({"max_denoising_steps": 2.0}, TypeError),
        ({"steps": 0}, ValueError),
        ({"block_length": 0}, ValueError),
        ({"block_length": True}, TypeError),
        ({"block_length": "8"}, TypeError),
        ({"temperature": -0.1}, ValueError),
        ({"temperature": float("nan")}, ValueError),
        ({"temperature": float("inf")}, ValueError),
        ({"temperature": 10**400}, ValueError),
        ({"cfg_scale": 10**400}, ValueError),
        ({"temperature": "0"}, TypeError),
        ({"temperature": 1e-30}, ValueError),
        ({"top_p": 0.0, "temperature": 1}, ValueError),
        ({"top_p": 1.1, "temperature": 1}, ValueError),
        ({"top_k": 0, "temperature": 1}, ValueError),
        ({"top_k": 2.0, "temperature": 1}, TypeError),
        ({"min_p": 1.5, "temperature": 1}, ValueError),
        ({"top_p": 0.9}, ValueError),
        ({"top_k": 5}, ValueError),
        ({"min_p": 0.1}, ValueError),
        ({"noise": 5}, TypeError),
        ({"streamer": "stdout"}, TypeError),
        ({"callback_on_step_end": 3}, TypeError),
        ({"eos_token_id": "2"}, TypeError),
        ({"eos_token_id": [2, 2.0]}, TypeError),
        ({"eos_token_id": True}, TypeError),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items())[:40] if isinstance(value, dict) else None,
)
def test_a_bad_value_raises_and_the_message_names_the_argument(kwargs, error):
    with pytest.raises(error, match=next(iter(kwargs))):
        of(**kwargs)


def test_zero_new_tokens_and_temperature_zero_as_an_int_are_legal():
    config = of(max_new_tokens=0, temperature=0)
    assert (config.max_new_tokens, config.temperature) == (0, 0)


def test_stop_strings_are_one_str_or_several_and_never_empty():
    assert of().stops == ()
    assert of(stop_strings="ab").stops == ("ab",)
    assert of(stop=["a", "b"]).stops == ("a", "b")
    for value in ("", ["a", ""], [1]):
        with pytest.raises(ValueError, match="stop_strings"):
            _ = of(stop_strings=value).stops
    with pytest.raises(TypeError, match="stop_strings"):
        _ = of(stop_strings=5).stops


def test_from_hf_takes_over_what_we_honour():
    hf = HFGenerationConfig(
        max_new_tokens=5, do_sample=True, temperature=0.7, top_k=9, eos_token_id=[3, 4], pad_token_id=0
    )
    config = GenerationConfig.from_hf(hf)
    assert (config.max_new_tokens, config.temperature, config.top_k, config.eos_token_id) == (5, 0.7, 9, [3, 4])


def test_from_hf_samples_only_when_the_config_says_so():
    assert GenerationConfig.from_hf({"do_sample": False, "temperature": 0.7, "top_p": 0.9}).temperature == 0
    assert GenerationConfig.from_hf({"temperature": 0.7}).temperature == 0
    assert GenerationConfig.from_hf({"do_sample": True}).temperature == 1.0


def test_from_hf_of_a_default_config_is_the_default():
    assert GenerationConfig.from_hf(HFGenerationConfig()) == GenerationConfig()


@pytest.mark.parametrize("field", ["repetition_penalty", "num_beams", "max_length", "no_repeat_ngram_size"])
def test_from_hf_refuses_a_field_that_would_change_the_output_and_that_we_ignore(field):
    with pytest.raises(ValueError, match=field):
        GenerationConfig.from_hf(HFGenerationConfig(**{field: 3}))


def test_from_hf_refuses_what_is_no_config():
    with pytest.raises(TypeError, match="generation_config"):
        GenerationConfig.from_hf(5)
