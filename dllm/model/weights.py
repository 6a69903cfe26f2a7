"""Model weights on disk: where each format is read and written.

load_state, save_safetensors    dllm/model/safetensors_file.py    one file, or shards with an index
read_gguf                       dllm/model/gguf_file.py           a Llama-type GGUF under Hugging Face names
smollm2_folder                  dllm/model/smollm2.py             SmolLM2-135M-Instruct, converted once and cached
"""

from dllm.model.gguf_file import read_gguf
from dllm.model.gguf_tokenizer import read_gguf_tokenizer
from dllm.model.safetensors_file import load_state, save_safetensors
from dllm.model.smollm2 import smollm2_folder

__all__ = ["load_state", "read_gguf", "read_gguf_tokenizer", "save_safetensors", "smollm2_folder"]
