"""Diffusers, both ways: our samplers as schedulers, diffusers' token schedulers as samplers of our loop, and a ``DiffusionPipeline``.

pipe = DllmPipeline.of(DiffusionLM.from_pretrained("smollm2-135m-bd8"), SamplerScheduler.of(Threshold(0.9)))
pipe("Once upon a time", gen_length=64).texts
lm.generate("Once upon a time", sampler=SchedulerSampler(BlockRefinementScheduler(threshold=0.9)))
"""

from dllm.bridge.diffusers_adapter import SchedulerSampler
from dllm.bridge.diffusers_pipeline import DllmModel, DllmPipeline, DllmPipelineOutput
from dllm.bridge.diffusers_scheduler import SamplerScheduler, SamplerSchedulerOutput

__all__ = [
    "DllmModel",
    "DllmPipeline",
    "DllmPipelineOutput",
    "SamplerScheduler",
    "SamplerSchedulerOutput",
    "SchedulerSampler",
]
