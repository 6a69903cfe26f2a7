"""Names of samplers, caches and verifiers, resolved once at the public face; numbers that nobody takes raise."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

SAMPLERS: dict[str, str] = {
    "low_confidence": "dllm.samplers.low_confidence:LowConfidence",
    "threshold": "dllm.samplers.threshold:Threshold",
    "random": "dllm.samplers.random:RandomOrder",
    "margin": "dllm.samplers.margin:Margin",
    "entropy": "dllm.samplers.entropy:Entropy",
    "factor": "dllm.samplers.factor:Factor",
    "frechet": "dllm.samplers.frechet:Frechet",
    "entropy_bound": "dllm.samplers.entropy_bound:EntropyBound",
    "klass": "dllm.samplers.klass:Klass",
    "maskgit_plus": "dllm.samplers.maskgit_plus:MaskgitPlus",
    "topk_margin": "dllm.samplers.topk_margin:TopkMargin",
    "dream_entropy": "dllm.samplers.dream_entropy:DreamEntropy",
    "low_confidence_static": "dllm.samplers.static:Static",
    "low_confidence_dynamic": "dllm.samplers.dynamic:Dynamic",
    "sequential": "dllm.samplers.sequential:Sequential",
    "confidence_threshold": "dllm.samplers.confidence_threshold:ConfidenceThreshold",
    "first_hitting": "dllm.samplers.first_hitting:FirstHitting",
    "ancestral": "dllm.samplers.ancestral:Ancestral",
    "uniform_canvas": "dllm.samplers.uniform_canvas:UniformCanvas",
    "block_refinement": "dllm.samplers.block_refinement:BlockRefinement",
    "wino": "dllm.samplers.wino:Wino",
    "end_last": "dllm.samplers.end_last:EndLast",
    "sub_block": "dllm.samplers.sub_block:SubBlock",
    "token_editing": "dllm.samplers.token_editing:TokenEditing",
}
CACHES: dict[str, str] = {
    "none": "dllm.cache.none:NoCache",
    "block": "dllm.cache.block:BlockCache",
    "free": "dllm.cache.free:FreeCache",
    "dual": "dllm.cache.dual:DualCache",
    "prefix": "dllm.cache.prefix:PrefixCache",
    "sliding": "dllm.cache.sliding:SlidingCache",
    "vicinity": "dllm.cache.vicinity:VicinityCache",
    "dkv": "dllm.cache.delayed:DelayedCache",
    "sub_block": "dllm.cache.sub_block:SubBlockCache",
}
VERIFIERS: dict[str, str] = {
    "free_dave": "dllm.samplers.free_dave:FreeDave",
    "s2d2": "dllm.samplers.s2d2:S2D2",
}


def resolve_sampler(value: Any, options: dict[str, Any], defaults: Mapping[str, Any]) -> Any:
    """A sampler object from a name with its numbers (taken out of ``options``), or the object itself."""
    return _resolve("sampler", SAMPLERS, value, options, defaults, method="step")


def resolve_cache(value: Any, options: dict[str, Any]) -> Any:
    """A cache object from a name with its numbers (taken out of ``options``), or the object itself."""
    return _resolve("cache", CACHES, value, options, {}, method="plan")


def resolve_verifier(value: Any, options: dict[str, Any]) -> Any:
    """A verifier object from a name with its numbers (taken out of ``options``), or the object itself."""
    if isinstance(value, str):
        return _resolve("verifier", VERIFIERS, value, options, {}, method="")
    if isinstance(value, type) or not (callable(getattr(value, "start", None)) or hasattr(value, "hook")):
        raise TypeError(f"verifier must be one of {sorted(VERIFIERS)} or an object such as SimSD(...): got {value!r}")
    return value


def hook_starter(verifier: Any) -> Any:
    """What makes, from a loop, the verifier at work: its own ``start``, or the class that its ``hook`` names."""
    if callable(getattr(verifier, "start", None)):
        return verifier.start
    module, name = verifier.hook.split(":")
    return partial(getattr(importlib.import_module(module), name), rule=verifier)


def resolve_hook(lm: Any, config: Any, options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What starts the guide or verifier of a config in a loop, or None; and the objects whose numbers it takes out of ``options``."""
    if config.guide is not None:
        guide = config.guide
        known = set(accepted_numbers(getattr(guide, "rule", None)))
        given = {name: options.pop(name) for name in list(options) if name in known}
        guide = guide.with_rule(**given) if given else guide
        return partial(guide.start, tokenizer=lm.tokenizer), [getattr(guide, "rule", None)]
    if config.verifier is not None:
        verifier = resolve_verifier(config.verifier, options)
        return hook_starter(verifier), [verifier]
    return None, []


def accepted_numbers(value: Any) -> list[str]:
    """Names of the numbers that a sampler or cache object takes."""
    return [f.name for f in fields(value)] if is_dataclass(value) else []


def _resolve(
    kind: str, table: Mapping[str, str], value: Any, options: dict[str, Any], defaults: Mapping[str, Any], method: str
) -> Any:
    if not isinstance(value, str):
        if isinstance(value, type) or not callable(getattr(value, method, None)):
            raise TypeError(f"{kind} must be one of {sorted(table)} or an object with {method}(): got {value!r}")
        return value
    if value not in table:
        raise ValueError(f"{kind} must be one of {sorted(table)}: got {value!r}")
    module, name = table[value].split(":")
    cls = getattr(importlib.import_module(module), name)
    known = {f.name for f in fields(cls)}
    given = {k: options.pop(k) for k in list(options) if k in known}
    return cls(**{**{k: v for k, v in defaults.items() if k in known}, **given})
