"""What a drafter's ``config.json`` says, in one form for the z-lab, AngelSpec and speculators layouts.

Names of the fields differ between the three, and one name (``num_target_layers``) has two meanings; everything that is
inconsistent, or that we do not honour, raises ValueError with the key's name. ``block_size`` of these files is our
``block_length``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dllm.families.llama import decoder_config
from dllm.model.decoder import DecoderConfig, inverse_frequencies

Kind = Literal["dflash", "dflash2", "dfly"]
Layout = Literal["z-lab", "angelspec", "speculators"]

KIND_OF_ARCHITECTURE: dict[str, Kind] = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DFlyDraftModel": "dfly",
    "Qwen3DFlyModel": "dfly",
}
_SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Keys of dflash_config that are read here; another key there changes the model in a way that we would miss.
_DFLASH_KEYS = frozenset(
    {"mask_token_id", "target_layer_ids", "block_size", "causal", "causal_head", "use_swa", "swa_window_size"}
    | {"input_embedding_scale", "output_multiplier", "final_logit_softcapping", "num_target_layers"}
    | set(_SELECTOR_KEYS)
)
# Keys that mean another model unless they have one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "use_aux_hidden_state": (None, True),
    "sample_from_anchor": (None, False),
    "markov_rank": (None, 0),
    "projector_type": (None,),
    "logit_scale": (None, 1, 1.0),
    "is_neox_style": (None, True),
    "hidden_act": (None, "silu"),
    "pure_draft_prefix_len": (None, 1),
    "add_one_rms_norm": (None, False),
}


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """The published rule for the tapped layers (DFlash, arXiv:2602.06036): evenly from 1 to L - 3, halves to the even
    number.

    For new drafters only; the ids stored in a checkpoint always win. 0-based layer ids.
    """
    if not 1 <= num_taps <= max(num_target_layers - 3, 1):
        raise ValueError(f"num_taps must be in [1, {max(num_target_layers - 3, 1)}]: got {num_taps}")
    if num_taps == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_taps - 1)) for i in range(num_taps)]


@dataclass(frozen=True)
class DraftConfig:
    """A drafter's shape and rules.

    body: its decoder layers (vocab_size = rows of the target's head). target_layer_ids: 0-based layers of the target
    whose outputs are tapped. block_length: slots with the anchor, so at most block_length - 1 drafts. windows, causal:
    one per layer (None: no window). num_target_layers: layers of the target, None where the file does not say.
    correction_width: None = no correction head. draft_vocab_size: rows of an own, reduced head, or None. metadata: what
    ``save_pretrained`` noted about the target.
    """

    kind: Kind
    layout: Layout
    body: DecoderConfig
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_length: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    target_hidden_size: int
    num_target_layers: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    correction_width: int | None = None
    draft_vocab_size: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vocab = self.body.vocab_size
        if not 0 <= self.mask_token_id < vocab:
            raise ValueError(f"mask_token_id must be in [0, vocab_size {vocab}): got {self.mask_token_id}")
        if self.block_length < 2:
            raise ValueError(f"block_size must be >= 2 (the anchor and a draft): got {self.block_length}")
        ids = self.target_layer_ids
        if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
            raise ValueError(f"target_layer_ids must be distinct layer ids >= 0: got {list(ids)}")
        if self.num_target_layers is not None and max(ids) >= self.num_target_layers:
            raise ValueError(
                f"target_layer_ids must be below the target's {self.num_target_layers} layers: got {list(ids)}"
            )
        layers = self.body.num_layers
        if len(self.windows) != layers or len(self.causal) != layers:
            raise ValueError(f"layer_types must name {layers} layers: got {len(self.windows)}")
        if any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"sliding_window must be >= 1: got {self.windows}")
        if self.kind == "dfly" and self.target_hidden_size != self.body.hidden_size:
            raise ValueError(
                f"target_hidden_size must equal hidden_size {self.body.hidden_size} (taps are added to the context): "
                f"got {self.target_hidden_size}"
            )
        if self.kind == "dflash2":
            for name in _SELECTOR_KEYS:
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} must be >= 1: got {getattr(self, name)}")
            if self.body.hidden_size % self.conv_group_size:
                raise ValueError(
                    f"conv_group_size must divide hidden_size {self.body.hidden_size}: got {self.conv_group_size}"
                )
            if self.selector_top_k > vocab:
                raise ValueError(f"selector_top_k must be at most vocab_size {vocab}: got {self.selector_top_k}")
        for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0: got {value}")
        if self.correction_width is not None and self.correction_width < 1:
            raise ValueError(f"hidden_correction_intermediate_size must be >= 1: got {self.correction_width}")

    @property
    def feature_width(self) -> int:
        """Width of the concatenated taps of one token."""
        return len(self.target_layer_ids) * self.target_hidden_size


def read_config(config: Mapping[str, Any]) -> DraftConfig:
    """A drafter's config dict in any of the three layouts. Raises ValueError, naming the key, for what is missing,
    unknown or at odds.
    """
    if "speculators_model_type" in config:
        return _read_speculators(config)
    architectures = config.get("architectures")
    known = [a for a in architectures or () if a in KIND_OF_ARCHITECTURE]
    if len(known) != 1:
        raise ValueError(f"architectures must hold one of {sorted(KIND_OF_ARCHITECTURE)}: got {architectures}")
    kind = KIND_OF_ARCHITECTURE[known[0]]
    inner = config.get("dflash_config") or {}
    unknown = sorted(set(inner) - _DFLASH_KEYS - set(_NEUTRAL))
    if unknown:
        raise ValueError(f"dflash_config must hold only {sorted(_DFLASH_KEYS)}: got {unknown}")
    _check_neutral(config, inner)
    keys = _Keys(config, inner)
    layers = _integer(config, "num_hidden_layers")
    ids = keys.layer_ids("target_layer_ids")
    also = config.get("eagle_aux_hidden_state_layer_ids")
    if also is not None and [i + 1 for i in ids] != list(also):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids must be target_layer_ids {ids} plus one: got {also}")
    count = keys.get("num_target_layers")
    if kind == "dfly":
        # AngelSpec counts the tapped layers under the name that z-lab uses for all layers of the target.
        if count is not None and count != len(ids):
            raise ValueError(f"num_target_layers must be the number of target_layer_ids, {len(ids)}: got {count}")
        count = _integer(config, "target_num_hidden_layers")
    elif count is None:
        raise ValueError("num_target_layers must be the number of the target's layers: it is missing")
    windows, causal = _layer_rules(config, inner, layers)
    width = _integer(config, "hidden_size")
    correction = None
    if kind == "dfly" and config.get("enable_hidden_correction", True):
        correction = config.get("hidden_correction_intermediate_size") or width
    draft_vocab = config.get("draft_vocab_size")
    return DraftConfig(
        kind=kind,
        layout="angelspec" if kind == "dfly" else "z-lab",
        body=_body(config),
        target_layer_ids=tuple(ids),
        mask_token_id=keys.integer("mask_token_id"),
        block_length=keys.integer("block_size"),
        windows=windows,
        causal=causal,
        target_hidden_size=config.get("target_hidden_size") or width,
        num_target_layers=count,
        correction_width=correction,
        draft_vocab_size=None if draft_vocab in (None, config.get("vocab_size")) else draft_vocab,
        metadata=config.get("dllm") or {},
        **_scales(keys),
        **({name: keys.integer(name) for name in _SELECTOR_KEYS} if kind == "dflash2" else {}),
    )


def _read_speculators(config: Mapping[str, Any]) -> DraftConfig:
    """speculators 0.9: the body in ``transformer_layer_config``, taps as indices of ``hidden_states`` (layer id plus
    one).
    """
    kind = config["speculators_model_type"]
    if kind not in ("dflash", "dflash2"):
        raise ValueError(f"speculators_model_type must be dflash or dflash2: got {kind!r}")
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        raise ValueError(f"transformer_layer_config must be a dictionary: got {inner!r}")
    _check_neutral(config, inner)
    keys = _Keys(config, {})
    aux = keys.layer_ids("aux_hidden_state_layer_ids")
    if min(aux) < 1:
        raise ValueError(f"aux_hidden_state_layer_ids must be >= 1 (0 is the embedding): got {aux}")
    layers = _integer(inner, "num_hidden_layers")
    windows, _ = _layer_rules(inner, {}, layers)
    flag = config.get("sliding_window_non_causal")
    if flag is None and any(w is not None for w in windows):
        raise ValueError("sliding_window_non_causal must be true or false where layers slide: it is missing")
    vocab = _integer(inner, "vocab_size")
    draft_vocab = config.get("draft_vocab_size")
    return DraftConfig(
        kind=kind,
        layout="speculators",
        body=_body(inner),
        target_layer_ids=tuple(i - 1 for i in aux),
        mask_token_id=keys.integer("mask_token_id"),
        block_length=keys.integer("block_size"),
        windows=windows,
        # The flag speaks of sliding layers only; full layers are bidirectional.
        causal=tuple(w is not None and not flag for w in windows),
        target_hidden_size=config.get("target_hidden_size") or _integer(inner, "hidden_size"),
        draft_vocab_size=None if draft_vocab in (None, vocab) else draft_vocab,
        metadata=config.get("dllm") or {},
        **_scales(keys),
        **({name: keys.integer(name) for name in _SELECTOR_KEYS} if kind == "dflash2" else {}),
    )


class _Keys:
    """Look-up of a key that may stand at the top, inside ``dflash_config``, or in both with one value."""

    def __init__(self, config: Mapping[str, Any], inner: Mapping[str, Any]) -> None:
        self.config, self.inner = config, inner

    def get(self, name: str) -> Any:
        top, nested = self.config.get(name), self.inner.get(name)
        if top is not None and nested is not None and top != nested:
            raise ValueError(f"{name} must be the same at the top and in dflash_config: got {top} and {nested}")
        return nested if top is None else top

    def integer(self, name: str) -> int:
        return _integer({name: self.get(name)}, name)

    def layer_ids(self, name: str) -> list[int]:
        value = self.get(name)
        if not isinstance(value, Sequence) or not value or not all(type(i) is int for i in value):
            raise ValueError(f"{name} must be a list of layer ids: got {value!r}")
        return list(value)


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer: got {value!r}")
    return value


def _body(config: Mapping[str, Any]) -> DecoderConfig:
    if config.get("model_type", "qwen3") != "qwen3":
        raise ValueError(f"model_type must be 'qwen3', the body of these drafters: got {config['model_type']!r}")
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        _integer(config, name)
    body = decoder_config(config, qk_norm=True, tie_embeddings=True)
    try:
        inverse_frequencies(body)
    except KeyError as error:
        raise ValueError(f"rope_scaling must have {error}: got {body.rope_scaling}") from error
    return body


def _scales(keys: _Keys) -> dict[str, Any]:
    cap = keys.get("final_logit_softcapping")
    return dict(
        input_embedding_scale=float(keys.get("input_embedding_scale") or 1.0),
        output_multiplier=float(keys.get("output_multiplier") or 1.0),
        final_logit_softcapping=None if cap is None else float(cap),
    )


def _check_neutral(*configs: Mapping[str, Any]) -> None:
    for config in configs:
        for name, values in _NEUTRAL.items():
            if config.get(name) not in values:
                raise ValueError(f"{name} must be one of {list(values)} (nothing else is built): got {config[name]!r}")


def _layer_rules(
    config: Mapping[str, Any], inner: Mapping[str, Any], layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality of each layer: ``is_causal`` wins; without it sliding layers are causal and full ones are
    not.
    """
    types, window = config.get("layer_types"), config.get("sliding_window")
    swa, swa_window = inner.get("use_swa"), inner.get("swa_window_size")
    if types is None:
        sliding = bool(swa) or bool(config.get("use_sliding_window"))
        first = 0 if swa else config.get("max_window_layers", 0)
        types = ["sliding_attention" if sliding and i >= first else "full_attention" for i in range(layers)]
        window = window if swa_window is None or not swa else swa_window
    if len(types) != layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types must name {layers} layers sliding_attention or full_attention: got {types}")
    slides = "sliding_attention" in types
    if slides and (type(window) is not int or window < 1):
        raise ValueError(f"sliding_window must be an integer >= 1 where layers slide: got {window!r}")
    if slides and config.get("use_sliding_window") is False:
        raise ValueError("use_sliding_window must be true where layer_types names sliding_attention: got false")
    if swa is not None and bool(swa) != slides:
        raise ValueError(f"use_swa must say whether layer_types {list(types)} slide: got {swa}")
    if slides and swa_window is not None and swa_window != window:
        raise ValueError(f"swa_window_size must equal sliding_window {window}: got {swa_window}")
    flags = {name: source[name] for source, name in _causal_keys(config, inner)}
    if any(type(value) is not bool for value in flags.values()) or len(set(flags.values())) > 1:
        raise ValueError(f"is_causal, causal and causal_head must be true or false and agree: got {flags}")
    override = next(iter(flags.values()), None)
    causal = tuple(kind == "sliding_attention" if override is None else override for kind in types)
    return tuple(window if kind == "sliding_attention" else None for kind in types), causal


def _causal_keys(config: Mapping[str, Any], inner: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """Where causality is declared; ``causal_head`` (JetSpec) makes every layer causal and says nothing when false."""
    found = [
        (source, name)
        for source, name in ((config, "is_causal"), (inner, "causal"), (config, "causal_head"), (inner, "causal_head"))
        if source.get(name) is not None
    ]
    return [(s, n) for s, n in found if n != "causal_head" or s[n] is not False]
