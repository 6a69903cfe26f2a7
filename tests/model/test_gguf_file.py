"""GGUF files: a tiny Llama written as llama.cpp writes it comes back as transformers has it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dllm.model.weights import read_gguf

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS = 4, 2


def tiny_llama(tied: bool, bias: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=tied,
        attention_bias=bias,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def llama_cpp_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order that llama.cpp stores: row i and row i + D/2 of a head lie side by side."""
    rows = weight.reshape(heads, -1, *weight.shape[1:])
    half = rows.shape[1] // 2
    order = [row for pair in range(half) for row in (pair, pair + half)]
    return rows[:, order].reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, quantise: str | None = None, **overrides: Any) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, overrides.get("architecture", "llama"))
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(overrides.get("heads", HEADS))
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(overrides.get("rotated", config.hidden_size // overrides.get("heads", HEADS)))
    writer.add_vocab_size(config.vocab_size)
    if "expert_count" in overrides:
        writer.add_expert_count(overrides["expert_count"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    tensor_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if ".q_proj." in name:
            array = llama_cpp_rows(array, HEADS)
        elif ".k_proj." in name:
            array = llama_cpp_rows(array, KV_HEADS)
        stored = tensor_map.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored == overrides.get("without"):
            continue
        if quantise is not None and array.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantise]
            writer.add_tensor(stored, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(array))
    if "extra" in overrides:
        writer.add_tensor(overrides["extra"], np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def expected_state(model: LlamaForCausalLM) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


@pytest.mark.parametrize(("tied", "bias"), [(True, False), (False, False), (True, True)])
def test_tensors_and_config_come_back_under_hugging_face_names(tmp_path: Path, tied: bool, bias: bool) -> None:
    model = tiny_llama(tied, bias)
    write_gguf(tmp_path / "tiny.gguf", model)
    config, tensors = read_gguf(tmp_path / "tiny.gguf")
    expected = expected_state(model)
    assert set(tensors) == set(expected)
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name
    for field, value in config.items():
        if field == "rope_theta":
            assert value == model.config.rope_parameters["rope_theta"]
        else:
            assert value == getattr(model.config, field) or (field, value) == ("architectures", ["LlamaForCausalLM"])


def test_a_model_built_from_the_file_has_the_logits_of_the_one_that_was_written(tmp_path: Path) -> None:
    model = tiny_llama(tied=True)
    write_gguf(tmp_path / "tiny.gguf", model)
    config, tensors = read_gguf(tmp_path / "tiny.gguf")
    rebuilt = LlamaForCausalLM(LlamaConfig(**config)).eval()
    rebuilt.load_state_dict(tensors, strict=False)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(rebuilt(ids).logits, model(ids).logits)


@pytest.mark.parametrize("quantise", [None, "Q4_1", "Q8_0"])
def test_tensors_equal_those_that_transformers_loads(tmp_path: Path, quantise: str | None) -> None:
    pytest.importorskip("accelerate", reason="transformers needs accelerate to load a GGUF")
    from transformers.utils.quantization_config import GgufConfig

    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tied=False), quantise)
    theirs = LlamaForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="tiny.gguf",
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    _, tensors = read_gguf(tmp_path / "tiny.gguf")
    assert set(tensors) == set(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(tensors[name], value), name


def test_dtype_rounds_what_was_dequantised_in_fp32_and_progress_is_told(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tied=True), "Q4_1")
    seen: list[tuple[int, int]] = []
    _, full = read_gguf(tmp_path / "tiny.gguf")
    _, half = read_gguf(
        tmp_path / "tiny.gguf", torch.bfloat16, on_tensor=lambda done, total: seen.append((done, total))
    )
    assert all(torch.equal(half[name], value.to(torch.bfloat16)) for name, value in full.items())
    assert seen == [(i + 1, len(full)) for i in range(len(full))]
    with pytest.raises(TypeError, match="dtype must be a floating torch.dtype: got torch.int8"):
        read_gguf(tmp_path / "tiny.gguf", torch.int8)


def test_a_truncated_file_is_an_error_that_names_it_wherever_it_ends(tmp_path: Path) -> None:
    whole, cut = tmp_path / "tiny.gguf", tmp_path / "cut.gguf"
    write_gguf(whole, tiny_llama(tied=True), "Q4_1")
    content = whole.read_bytes()
    for length in [0, 3, 4, 20, *range(30, len(content), len(content) // 40), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf is not a complete GGUF file"):
            read_gguf(cut)


def test_a_file_of_something_else_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.gguf does not exist"):
        read_gguf(tmp_path / "nowhere.gguf")
    (tmp_path / "page.gguf").write_bytes(b"<html>404 not found</html>" * 100)
    with pytest.raises(ValueError, match=r"page\.gguf is not a complete GGUF file"):
        read_gguf(tmp_path / "page.gguf")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architecture": "mamba"}, "general.architecture must be llama: got 'mamba'"),
        ({"rotated": 8}, "llama.rope.dimension_count must equal the head width 16: got 8"),
        ({"heads": 8}, "k_proj.weight must have shape .16, 64.: got .32, 64."),
        ({"expert_count": 4}, "experts are not supported"),
        ({"extra": "rope_freqs.weight"}, "tensor 'rope_freqs.weight' has no place"),
        ({"extra": "blk.0.attn_norm.bias"}, "tensor 'blk.0.attn_norm.bias' has no place"),
        ({"without": "blk.1.ffn_up.weight"}, "lacks 1 tensors.*layers.1.mlp.up_proj"),
    ],
)
def test_what_is_not_a_plain_llama_is_refused_by_name(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tied=True), **overrides)
    with pytest.raises(ValueError, match=message):
        read_gguf(tmp_path / "tiny.gguf")
