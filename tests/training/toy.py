"""A toy base for the trainer's tests: a tiny random AR checkpoint folder with a tokenizer, and a corpus that can be learned."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<start>", "<|im_start|>", "<|im_end|>", "<mask>", "<filler>"]
START, STOP, MASK, FILLER = 0, 2, 3, 4
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }}{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, a-z, digits and some signs; the chat template is as short as it gets."""
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789 .\n")
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate([*SPECIAL, *letters])}, unk_token=" "))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=SPECIAL
    )
    fast.chat_template = TEMPLATE
    return fast


def toy_base(folder: Path, family: str) -> Path:
    """Save a random two-layer Llama or Qwen3 and its tokenizer as a Hugging Face folder."""
    torch.manual_seed(0)
    tokenizer = toy_tokenizer()
    shape = dict(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=256,
        eos_token_id=STOP,
        tie_word_embeddings=family == "llama",
        # The head stays frozen: with the usual 0.02 its logits could not become sure of anything.
        initializer_range=0.12,
    )
    model = LlamaForCausalLM(LlamaConfig(**shape)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def toy_corpus(path: Path, count: int = 120) -> Path:
    """Chats whose answer repeats the question's letter in a fixed pattern, as JSONL."""
    lines = []
    for i in range(count):
        letter = "abcdefgh"[i % 8]
        lines.append(json.dumps({"prompt": f"say {letter}", "answer": f"{letter} {letter} 12{letter}. " * (2 + i % 3)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
