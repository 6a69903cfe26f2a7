"""Which guides and verifiers run in captured steps (``dllm/device_loop.py``, ``dllm/device_guided.py``), and why the others do not."""

from __future__ import annotations

from functools import partial

from dllm.cache.block import BlockCache
from dllm.guide import ARGuide
from dllm.hooks_free_dave import FreeDaveHook
from dllm.kernels._launch import use_triton
from dllm.kernels.denoise_step import MAX_BLOCK, MAX_BRANCHED
from dllm.model.fast_decoder import unfit
from dllm.request import DenoiseRequest
from dllm.samplers.free_dave import FreeDave


def free_dave(request: DenoiseRequest) -> FreeDave | None:
    """The request's verifier, if it is FreeDave."""
    hook = request.hook
    return hook.keywords["rule"] if isinstance(hook, partial) and hook.func is FreeDaveHook else None


def guide_of(request: DenoiseRequest) -> ARGuide | None:
    """The request's guide, if it is an ``ARGuide`` and no subclass."""
    hook = request.hook
    owner = getattr(hook.func, "__self__", None) if isinstance(hook, partial) else None
    # A subclass may start or decide otherwise.
    return owner if type(owner) is ARGuide else None


def refused(request: DenoiseRequest) -> str | None:
    """Why the request's guide or verifier must run on the host, or None. Asked only of whole block lengths."""
    if request.hook is None:
        return None
    name, own = "hook", None
    if (rule := free_dave(request)) is not None:
        name, own = "FreeDave", _branches(request, rule)
    elif (guide := guide_of(request)) is not None:
        name, own = "a guide", _guided(request, guide)
    else:
        return name
    if own is None:
        own = _bookkeeping(request)
    return None if own is None else f"{name} {own}"


def _bookkeeping(request: DenoiseRequest) -> str | None:
    """What only the kernels' bookkeeping knows."""
    if not isinstance(request.cache, BlockCache) or not use_triton(request.canvas.ids):
        return "without the block cache and kernels"
    if request.spec.first_slot == "commit_store_pass":
        return "behind a pass that only stores"
    assert isinstance(request.block_length, int), "asked of whole block lengths only"
    return f"with blocks of {request.block_length}" if request.block_length > MAX_BLOCK else None


def _branches(request: DenoiseRequest, rule: FreeDave) -> str | None:
    if rule.rule != "exact":
        return f"with rule {rule.rule!r}"
    if rule.draft_steps < 2:
        return "without a draft"
    assert isinstance(request.block_length, int), "asked of whole block lengths only"
    rows = rule.draft_steps * request.block_length
    return f"with {rows} rows" if rows > MAX_BRANCHED else None


def _guided(request: DenoiseRequest, guide: ARGuide) -> str | None:
    rule = guide.rule
    if not rule.lossless or request.temperature > 0:
        return "that is not the guide's own greedy text"
    if rule.guide_passes not in (None, 1):
        return f"with {rule.guide_passes} passes"
    assert isinstance(request.block_length, int), "asked of whole block lengths only"
    if rule.verify_batch_size < request.block_length:
        return "that reads a block in parts"
    if (reason := unfit(guide.model)) is not None:
        return f"where {reason}"
    hook = request.hook
    assert isinstance(hook, partial), "guide_of found it there"
    if guide.model.device != request.canvas.ids.device:
        return "on another device"
    if hook.keywords.get("byte_vocabulary") is not None or guide.vocabulary not in ("same", "auto"):
        return "of another vocabulary"
    if guide.vocabulary == "auto" and not guide.same_vocabulary(
        hook.keywords.get("tokenizer"), request.spec.vocab_size
    ):
        return "of another vocabulary"
    return None
