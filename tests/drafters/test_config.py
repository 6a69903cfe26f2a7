"""Every inconsistency of a drafter's config is an error that names the key."""

import json

import pytest

from dllm.drafters.config import default_target_layer_ids, read_config


@pytest.fixture
def zlab(golden):
    return json.loads((golden / "dflash_swa_scaled" / "draft" / "config.json").read_text())


@pytest.fixture
def angelspec(golden):
    return json.loads((golden / "dfly" / "draft" / "config.json").read_text())


@pytest.fixture
def speculators(zlab):
    body = {
        k: v for k, v in zlab.items() if k not in ("architectures", "dflash_config", "block_size", "num_target_layers")
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": body,
        "draft_vocab_size": 128,
        "block_size": 6,
        "mask_token_id": 125,
        "aux_hidden_state_layer_ids": [2, 3, 5],
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
    }


def put(config, path, value):
    *folders, name = path.split(".")
    for folder in folders:
        config = config[folder]
    if value is DELETE:
        del config[name]
    else:
        config[name] = value


DELETE = object()


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (28, [1, 7, 13, 19, 25]),
        (30, [1, 8, 14, 20, 27]),
        (32, [1, 8, 15, 22, 29]),
        (36, [1, 9, 17, 25, 33]),
        (48, [1, 12, 23, 34, 45]),
        (62, [1, 16, 30, 44, 59]),
        (64, [1, 16, 31, 46, 61]),
        (80, [1, 20, 39, 58, 77]),
    ],
)
def test_the_tap_rule_gives_the_published_layers_and_rounds_halves_to_even(num_layers, expected):
    assert default_target_layer_ids(num_layers, 5) == expected


def test_one_tap_is_the_middle_layer_and_too_many_are_an_error():
    assert default_target_layer_ids(30, 1) == [15]
    with pytest.raises(ValueError, match="num_taps"):
        default_target_layer_ids(6, 5)


def test_sliding_layers_are_causal_and_full_ones_are_not_unless_the_config_says_so(zlab):
    config = read_config(zlab)
    assert config.windows == (7, 7, None)
    assert config.causal == (True, True, False)
    assert (config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping) == (1.5, 0.5, 20.0)
    zlab["is_causal"] = False
    assert read_config(zlab).causal == (False, False, False)
    zlab["is_causal"] = True
    assert read_config(zlab).causal == (True, True, True)
    del zlab["is_causal"]
    zlab["dflash_config"]["causal_head"] = True
    assert read_config(zlab).causal == (True, True, True)


def test_block_size_and_mask_may_stand_inside_dflash_config(zlab):
    inner = zlab["dflash_config"]
    inner["block_size"] = zlab.pop("block_size")
    assert read_config(zlab).block_length == 6
    zlab["mask_token_id"] = inner.pop("mask_token_id")
    assert read_config(zlab).mask_token_id == 125


def test_windows_may_be_declared_in_dflash_config_alone(zlab):
    for name in ("layer_types", "sliding_window", "use_sliding_window"):
        del zlab[name]
    zlab["dflash_config"].update(use_swa=True, swa_window_size=9)
    assert read_config(zlab).windows == (9, 9, 9)


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        ("dflash_config.mask_token_id", -1, "mask_token_id"),
        ("dflash_config.mask_token_id", 128, "mask_token_id"),
        ("dflash_config.mask_token_id", DELETE, "mask_token_id"),
        ("mask_token_id", 3, "mask_token_id"),
        ("dflash_config.target_layer_ids", DELETE, "target_layer_ids"),
        ("dflash_config.target_layer_ids", [1, 2, 6], "target_layer_ids"),
        ("dflash_config.target_layer_ids", [-1, 2, 4], "target_layer_ids"),
        ("dflash_config.target_layer_ids", [1, 1, 4], "target_layer_ids"),
        ("dflash_config.target_layer_ids", "124", "target_layer_ids"),
        ("target_layer_ids", [2, 3, 5], "target_layer_ids"),
        ("eagle_aux_hidden_state_layer_ids", [1, 2, 4], "eagle_aux_hidden_state_layer_ids"),
        ("num_target_layers", DELETE, "num_target_layers"),
        ("block_size", DELETE, "block_size"),
        ("block_size", 1, "block_size"),
        ("dflash_config.block_size", 8, "block_size"),
        ("sliding_window", None, "sliding_window"),
        ("sliding_window", 0, "sliding_window"),
        ("use_sliding_window", False, "use_sliding_window"),
        ("layer_types", ["full_attention"], "layer_types"),
        ("layer_types", ["full_attention", "linear_attention", "full_attention"], "layer_types"),
        ("dflash_config.use_swa", False, "use_swa"),
        ("dflash_config.swa_window_size", 6, "swa_window_size"),
        ("is_causal", "no", "is_causal"),
        ("architectures", ["DSparkDraftModel"], "architectures"),
        ("architectures", None, "architectures"),
        ("model_type", "llama", "model_type"),
        ("hidden_act", "gelu", "hidden_act"),
        ("hidden_size", DELETE, "hidden_size"),
        ("num_key_value_heads", 3, "num_heads"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_scaling"),
        ("rope_scaling", {"rope_type": "linear"}, "rope_scaling must have 'factor'"),
        ("dflash_config.attention_sink_bias", True, "attention_sink_bias"),
        ("dflash_config.attention_value_scale", 0.5, "attention_value_scale"),
        ("dflash_config.projector_type", "domino", "projector_type"),
        ("dflash_config.something_new", 1, "something_new"),
        ("sample_from_anchor", True, "sample_from_anchor"),
        ("markov_rank", 64, "markov_rank"),
        ("logit_scale", 0.5, "logit_scale"),
        ("is_neox_style", False, "is_neox_style"),
        ("dflash_config.output_multiplier", -1.0, "output_multiplier"),
        ("dflash_config.final_logit_softcapping", 0.0, "final_logit_softcapping"),
    ],
)
def test_a_z_lab_config_at_odds_with_itself_is_refused(zlab, path, value, key):
    put(zlab, path, value)
    with pytest.raises(ValueError, match=key):
        read_config(zlab)


def test_two_flags_of_causality_must_agree(zlab):
    zlab["is_causal"], zlab["dflash_config"]["causal"] = True, False
    with pytest.raises(ValueError, match="is_causal, causal and causal_head"):
        read_config(zlab)


def test_angelspec_counts_taps_under_the_name_that_z_lab_uses_for_layers(angelspec):
    config = read_config(angelspec)
    assert (config.kind, config.num_target_layers, config.correction_width) == ("dfly", 6, 64)
    angelspec["architectures"] = ["Qwen3DFlyModel"]
    assert read_config(angelspec) == config
    angelspec["hidden_correction_intermediate_size"] = None
    assert read_config(angelspec).correction_width == 48
    angelspec["enable_hidden_correction"] = False
    assert read_config(angelspec).correction_width is None


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        ("num_target_layers", 6, "num_target_layers"),
        ("target_num_hidden_layers", DELETE, "target_num_hidden_layers"),
        # The config of another revision: taps of an 80-layer target.
        ("target_layer_ids", [1, 39, 77], "target_layer_ids"),
        ("target_hidden_size", 64, "target_hidden_size"),
        ("mask_token_id", None, "mask_token_id"),
        ("hidden_correction_intermediate_size", -3, "hidden_correction_intermediate_size"),
    ],
)
def test_an_angelspec_config_at_odds_with_itself_is_refused(angelspec, path, value, key):
    put(angelspec, path, value)
    with pytest.raises(ValueError, match=key):
        read_config(angelspec)


def test_speculators_ids_are_one_higher_and_its_causal_flag_speaks_of_sliding_layers_only(speculators):
    config = read_config(speculators)
    assert config.target_layer_ids == (1, 2, 4)
    assert config.causal == (True, True, False)
    speculators["sliding_window_non_causal"] = True
    assert read_config(speculators).causal == (False, False, False)


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        ("speculators_model_type", "dspark", "speculators_model_type"),
        ("transformer_layer_config", None, "transformer_layer_config"),
        ("aux_hidden_state_layer_ids", [0, 2, 4], "aux_hidden_state_layer_ids"),
        ("aux_hidden_state_layer_ids", None, "aux_hidden_state_layer_ids"),
        ("sliding_window_non_causal", DELETE, "sliding_window_non_causal"),
        ("sample_from_anchor", True, "sample_from_anchor"),
        ("mask_token_id", None, "mask_token_id"),
        ("transformer_layer_config.vocab_size", 100, "mask_token_id"),
    ],
)
def test_a_speculators_config_at_odds_with_itself_is_refused(speculators, path, value, key):
    put(speculators, path, value)
    with pytest.raises(ValueError, match=key):
        read_config(speculators)


@pytest.mark.parametrize(
    ("name", "value"),
    [("selector_top_k", 129), ("selector_rank", 0), ("conv_group_size", 7), ("conv_kernel_size", None)],
)
def test_a_dflash2_config_must_fit_its_convolutions_and_selector(golden, name, value):
    config = json.loads((golden / "dflash2" / "draft" / "config.json").read_text())
    assert read_config(config).selector_top_k == 6
    config["dflash_config"][name] = value
    with pytest.raises(ValueError, match=name):
        read_config(config)
