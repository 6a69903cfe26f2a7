"""``DllmPipeline``: a diffusers pipeline whose call is ``DiffusionLM.generate``; it is saved and loaded as other pipelines are."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dllm.bridge.diffusers_adapter import SchedulerSampler
from dllm.bridge.diffusers_scheduler import SamplerScheduler
from dllm.families import find_family
from dllm.families.loading import load_checkpoint, restore_buffers
from dllm.families.placement import resolve_device_map
from dllm.output import Stats
from dllm.pipeline import DiffusionLM
from dllm.types import DecodeSpec

WEIGHTS_NAME = "dllm_model.safetensors"
CHECKPOINT_FOLDER = "checkpoint"


@dataclass
class DllmPipelineOutput(BaseOutput):
    """As ``GenerationOutput``: sequences [B, T] int64, right-padded; lengths; texts (None for output_type "seq"); finish_reasons; stats."""

    sequences: Tensor
    lengths: list[int]
    texts: list[str] | None
    finish_reasons: list[str]
    stats: Stats


@dataclass
class DllmModelOutput(BaseOutput):
    """logits [B, L, V], before the shift."""

    logits: Tensor


class DllmModel(ModelMixin, ConfigMixin):
    """The weights of a ``DiffusionLM`` with what is needed to build it again: the checkpoint's config and the DecodeSpec.

    A saved folder holds ``dllm_config.json`` and the tensors under the module's own names; a family that wraps another library's
    class is saved by that class.
    """

    config_name = "dllm_config.json"

    def __init__(self, lm: DiffusionLM) -> None:
        """lm: a loaded model. Raises ValueError for one whose config names no family."""
        super().__init__()
        self.family = find_family(lm.config).name
        self.module = lm.model
        self.spec = lm.spec
        self.register_to_config(family=self.family, checkpoint=dict(lm.config), spec=asdict(lm.spec))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> DllmModelOutput:
        """Logits of ``DiffusionLM.forward``, in the form in which diffusers' own pipelines of token models call one.

        position_ids [B, L]: checked, not used: positions count tokens, so that where there is one it must have that number. Raises
        ValueError for others.
        """
        if position_ids is not None:
            valid = torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).long()
            if not torch.equal(position_ids * valid, (valid.cumsum(-1) - 1) * valid):
                raise ValueError("position_ids must count the tokens of each row from 0: got others")
        return DllmModelOutput(self.lm().forward(input_ids, attention_mask))

    def to(self, *args: Any, **kwargs: Any) -> DllmModel:
        """As ``nn.Module.to``; tables that are computed, not stored, stay fp32."""
        super().to(*args, **kwargs)
        if find_family(self.config["checkpoint"], self.family).load is None:
            restore_buffers(self.module, {"": next(self.module.parameters()).device})
        return self

    def lm(self, tokenizer: Any = None) -> DiffusionLM:
        """The same model as a ``DiffusionLM``."""
        return DiffusionLM(self.module, self.spec, tokenizer, dict(self.config["checkpoint"]))

    def save_pretrained(self, save_directory: str | Path, **unused: Any) -> None:
        """Write config and weights; diffusers' own options about formats and shards have no meaning here."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.save_config(folder)
        wrapped = getattr(self.module, "wrapped", None)
        if find_family(self.config["checkpoint"]).load is not None:
            assert wrapped is not None, "a family that loads itself wraps a class that saves itself"
            wrapped.save_pretrained(folder / CHECKPOINT_FOLDER)
            return
        # Tied tensors are written once, under their first name.
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            unique.setdefault(id(tensor), (name, tensor))
        save_file({name: t.detach().cpu().contiguous() for name, t in unique.values()}, folder / WEIGHTS_NAME)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, torch_dtype: torch.dtype | None = None, **unused: Any
    ) -> DllmModel:
        """Read what ``save_pretrained`` has written, in its own dtype unless torch_dtype is given."""
        folder = Path(pretrained_model_name_or_path)
        config = json.loads((folder / cls.config_name).read_text(encoding="utf-8"))
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config["spec"].items()}
        spec = DecodeSpec(**values)
        family = find_family(config["checkpoint"], config["family"])
        if family.load is not None:
            module, _, _, _ = load_checkpoint(
                folder / CHECKPOINT_FOLDER, family.name, "auto" if torch_dtype is None else torch_dtype, "cpu"
            )
        else:
            module = _filled(family.build, config["checkpoint"], load_file(folder / WEIGHTS_NAME), torch_dtype)
        return cls(DiffusionLM(module, spec, None, config["checkpoint"]))


def _filled(
    build: Callable[[Any], nn.Module], config: Any, state: dict[str, Tensor], dtype: torch.dtype | None
) -> nn.Module:
    """The family's module with these tensors; names are checked both ways."""
    with torch.device("meta"):
        module = build(config)
    groups: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    if "mask_embedding" in state and hasattr(module, "mask_embedding"):
        groups[-1] = ["mask_embedding"]
    missing = [names[0] for names in groups.values() if not set(names) & set(state)]
    unknown = sorted(set(state) - {name for names in groups.values() for name in names})
    if missing or unknown:
        raise ValueError(f"{WEIGHTS_NAME} does not fit its config: missing {missing[:5]}, unknown {unknown[:5]}")
    for names in groups.values():
        value = next(state[name] for name in names if name in state)
        value = value if dtype is None or not value.is_floating_point() else value.to(dtype)
        shared = nn.Parameter(value, requires_grad=False)
        for name in names:
            owner, _, leaf = name.rpartition(".")
            part = module.get_submodule(owner)
            setattr(part, leaf, value if leaf in part._buffers else shared)
    restore_buffers(module, resolve_device_map(module, torch.device("cpu")))
    return module.eval().requires_grad_(False)


class DllmPipeline(DiffusionPipeline):
    """Text generation by denoising, with diffusers' names.

    model: a ``DllmModel``; scheduler: a ``SamplerScheduler``, or diffusers' ``BlockRefinementScheduler`` or ``EntropyBoundScheduler``;
    tokenizer: transformers', or None, which leaves input_ids and output_type "seq".
    """

    model: DllmModel
    scheduler: Any
    tokenizer: Any
    _optional_components: ClassVar[list[str]] = ["tokenizer"]
    _callback_tensor_inputs: ClassVar[list[str]] = ["canvas", "masked", "slots", "transfer_index"]

    def __init__(self, model: DllmModel, scheduler: Any, tokenizer: Any = None) -> None:
        super().__init__()
        self.register_modules(model=model, scheduler=scheduler, tokenizer=tokenizer)

    @classmethod
    def of(cls, lm: DiffusionLM, scheduler: Any = None) -> DllmPipeline:
        """From a loaded model; scheduler None: its own default sampler."""
        if scheduler is None:
            numbers = {"threshold": lm.spec.default_threshold} if lm.spec.default_sampler == "threshold" else {}
            scheduler = SamplerScheduler(
                sampler=lm.spec.default_sampler, numbers=numbers, mask_token_id=lm.spec.mask_token_id
            )
        return cls(DllmModel(lm), scheduler, lm.tokenizer)

    def sampler(self) -> Any:
        """The sampler of our loop that decides as the scheduler does."""
        if isinstance(self.scheduler, SamplerScheduler):
            return self.scheduler.sampler
        mask = None if hasattr(self.model.module, "soft_embed") else self.model.spec.mask_token_id
        return SchedulerSampler(self.scheduler, mask)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        messages: Sequence[Any] | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        use_chat_template: bool | str = "auto",
        gen_length: int = 256,
        block_length: Any = None,
        num_inference_steps: int | None = None,
        seed: int | list[int] | None = None,
        generator: torch.Generator | None = None,
        output_type: str = "text",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Answer a prompt -> DllmPipelineOutput, or without return_dict (sequences, texts).

        Arguments are those of ``DiffusionLM.generate``, which gets kwargs too (temperature, cache, stop_strings, ...). gen_length:
        new tokens; num_inference_steps: most steps a block, None: as many as the sampler takes; generator: gives the seed.
        callback_on_step_end(pipe, step, timestep, callback_kwargs) -> dict, after each step, with the tensors named in
        callback_on_step_end_tensor_inputs (canvas, masked [B', L], slots, transfer_index [B', S]; default: canvas); a PipelineCallback
        names its own. They are there to be read: a dict with another tensor in it raises ValueError.
        """
        if output_type not in ("text", "seq"):
            raise ValueError(f"output_type must be 'text' or 'seq': got {output_type!r}")
        if output_type == "text" and self.tokenizer is None:
            raise ValueError("output_type 'text' needs a tokenizer and this pipeline has none: use 'seq'")
        if generator is not None:
            if seed is not None:
                raise ValueError("seed and generator must not both be given")
            seed = int(torch.randint(0, 2**62, (), generator=generator, device=generator.device))
        out = self.model.lm(self.tokenizer).generate(
            prompt,
            messages=messages,
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_chat_template=use_chat_template,
            max_new_tokens=gen_length,
            block_length=block_length,
            max_denoising_steps=num_inference_steps,
            sampler=self.sampler(),
            seed=seed,
            callback_on_step_end=self._callback(callback_on_step_end, callback_on_step_end_tensor_inputs),
            **kwargs,
        )
        texts = out.texts if output_type == "text" else None
        if not return_dict:
            return out.sequences, texts
        return DllmPipelineOutput(out.sequences, out.lengths, texts, out.finish_reasons, out.stats)

    def _callback(self, callback: Callable[..., Any] | None, names: list[str] | None) -> Callable[..., None] | None:
        if isinstance(callback, (PipelineCallback, MultiPipelineCallbacks)):
            names = callback.tensor_inputs
        names = ["canvas"] if names is None else list(names)
        unknown = sorted(set(names) - set(self._callback_tensor_inputs))
        if unknown:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs must be among {self._callback_tensor_inputs}: got {unknown}"
            )
        if callback is None:
            return None

        def call(lm: DiffusionLM, step: int, timestep: int, values: dict[str, Any]) -> None:
            given = {name: values[name] for name in names}
            # Diffusers counts steps from 0.
            back = callback(self, step - 1, timestep - 1, given)
            changed = [name for name, value in (back or {}).items() if value is not values.get(name)]
            if changed:
                raise ValueError(f"callback_on_step_end must return the tensors that it got: {changed} are others")

        return call
