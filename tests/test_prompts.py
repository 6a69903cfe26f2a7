"""From text, messages or padded ids to one list of ids a row: the mask decides what is padding, values never do."""

import numpy as np
import pytest
import torch

from dllm.prompts import encode_prompts
from tests.words import byte_tokenizer


def ids_of(input_ids, attention_mask=None):
    return encode_prompts(None, 64, input_ids=input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool, torch.float32], ids=str)
def test_any_padding_side_and_any_mask_dtype_give_the_same_rows(kind):
    # Zero is the padding value of one row and a real token of the other.
    ids = torch.tensor([[0, 0, 5, 6], [7, 0, 8, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]).to(kind)
    assert ids_of(ids, mask) == [[5, 6], [7, 0, 8]]


def test_without_a_mask_every_id_counts():
    assert ids_of([[0, 0, 5]]) == [[0, 0, 5]]
    assert ids_of(np.array([2, 3])) == [[2, 3]]


@pytest.mark.parametrize(
    ("ids", "mask", "error", "message"),
    [
        ([[1, 64]], None, ValueError, "input_ids must hold ids in \\[0, 64\\): row 0 has 64"),
        ([[1, 2], [3, -1]], None, ValueError, "row 1 has -1"),
        ([[1.0, 2.0]], None, TypeError, "input_ids must be integers"),
        ([[True, False]], None, TypeError, "input_ids must be integers"),
        ([], None, ValueError, "input_ids must not be empty"),
        ([[]], None, ValueError, "input_ids must not be empty"),
        ([[[1]]], None, ValueError, "input_ids must be \\[B, P\\]"),
        ([[1, 2]], [[1]], ValueError, "attention_mask must have the shape"),
        ([[1, 2]], [[1, 2]], ValueError, "attention_mask must hold 0 and 1"),
        ([[1, 2], [3, 4]], [[1, 1], [0, 0]], ValueError, "input_ids must not be empty: row 1"),
    ],
)
def test_bad_ids_and_masks_raise_naming_argument_and_row(ids, mask, error, message):
    with pytest.raises(error, match=message):
        ids_of(ids, mask)


def test_an_id_out_of_range_behind_the_mask_is_padding_like_any_other():
    assert ids_of([[99, 5]], [[0, 1]]) == [[5]]


def test_exactly_one_source_must_be_given():
    with pytest.raises(ValueError, match="exactly one"):
        encode_prompts(None, 64)
    with pytest.raises(ValueError, match="exactly one"):
        encode_prompts(byte_tokenizer(), 64, prompt="a", input_ids=[[1]])
    with pytest.raises(ValueError, match="attention_mask goes with input_ids"):
        encode_prompts(byte_tokenizer(), 64, prompt="a", attention_mask=[[1]])


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="prompt needs a tokenizer"):
        encode_prompts(None, 64, prompt="a")


def test_a_str_is_a_users_turn_where_there_is_a_template_and_raw_text_on_request():
    plain, chat = byte_tokenizer(), byte_tokenizer(template=True)
    raw = plain.encode("cab", add_special_tokens=False)
    turn = plain.encode("u.cab\na.", add_special_tokens=False)
    assert encode_prompts(plain, 64, "cab") == [raw]
    assert encode_prompts(chat, 64, "cab") == [turn]
    assert encode_prompts(chat, 64, ["cab", "cab"], use_chat_template=True) == [turn, turn]
    assert encode_prompts(chat, 64, "cab", use_chat_template=False) == [raw]
    assert encode_prompts(chat, 64, messages=[{"role": "user", "content": "cab"}]) == [turn]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"prompt": ""}, ValueError, "prompt must not be empty: row 0"),
        ({"prompt": ["a", ""]}, ValueError, "prompt must not be empty: row 1"),
        ({"prompt": []}, ValueError, "prompt must hold at least one row"),
        ({"prompt": ["a", 5]}, TypeError, "row 1 is int"),
        (
            {"prompt": ["a\udcff"]},
            ValueError,
            "text must be valid Unicode: got the lone surrogate '.udcff' at character 1",
        ),
        ({"messages": []}, ValueError, "messages must not be empty"),
        ({"messages": {"role": "user", "content": "a"}}, TypeError, "messages must be a list of messages .*: got dict"),
        ({"messages": "a"}, TypeError, "messages must be a list of messages .*: got str"),
        ({"messages": ["a"]}, TypeError, "messages must be a list of messages .*: row 0 is str"),
        ({"messages": [[{"role": "user", "content": "a"}], ["a"]]}, TypeError, "messages .*: row 1 holds str"),
        ({"prompt": "a", "use_chat_template": True}, ValueError, "use_chat_template=True needs"),
        ({"prompt": "a", "use_chat_template": "yes"}, ValueError, "use_chat_template must be"),
    ],
)
def test_bad_text_raises_naming_argument_and_row(kwargs, error, message):
    with pytest.raises(error, match=message):
        encode_prompts(byte_tokenizer(), 64, **kwargs)
