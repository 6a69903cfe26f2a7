"""Diffusion language models made fast, and diffusion drafters that make autoregressive models fast."""

from dllm.config import GenerationConfig
from dllm.drafters.drafter import Drafter
from dllm.output import GenerationOutput, InfillOutput, Stats
from dllm.pipeline import DiffusionLM
from dllm.speculate import speculative_generate, speculative_stream
from dllm.streaming import StreamEvent
from dllm.target import load_target
from dllm.types import BlockPolicy, DecodeSpec

__all__ = [
    "BlockPolicy",
    "DecodeSpec",
    "DiffusionLM",
    "Drafter",
    "GenerationConfig",
    "GenerationOutput",
    "InfillOutput",
    "Stats",
    "StreamEvent",
    "load_target",
    "speculative_generate",
    "speculative_stream",
]
__version__ = "0.1.0"
