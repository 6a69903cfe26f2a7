"""Diffusion language models made fast, and diffusion drafters that make autoregressive models fast."""

from dllm.config import GenerationConfig
from dllm.drafters.drafter import Drafter
from dllm.guide import ARGuide
from dllm.output import GenerationOutput, InfillOutput, Stats
from dllm.pipeline import DiffusionLM
from dllm.samplers.ada_block import AdaBlock
from dllm.samplers.block_pilot import BlockPilot
from dllm.samplers.free_dave import FreeDave
from dllm.samplers.s2d2 import S2D2
from dllm.samplers.simsd import SimSD
from dllm.speculate import speculative_generate, speculative_stream
from dllm.streaming import StreamEvent
from dllm.target import load_target
from dllm.types import BlockPolicy, DecodeSpec

__all__ = [
    "S2D2",
    "ARGuide",
    "AdaBlock",
    "BlockPilot",
    "BlockPolicy",
    "DecodeSpec",
    "DiffusionLM",
    "Drafter",
    "FreeDave",
    "GenerationConfig",
    "GenerationOutput",
    "InfillOutput",
    "SimSD",
    "Stats",
    "StreamEvent",
    "load_target",
    "speculative_generate",
    "speculative_stream",
]
__version__ = "0.1.0"
