"""The diffusion transformer of MDLM (Sahoo et al. 2024, arXiv:2406.07524) and BD3-LM (Arriola et al. 2025,
arXiv:2503.09573).

LayerNorm in fp32 without bias, adaptive scale, shift and gate (Peebles & Xie 2022, arXiv:2212.09748), fused qkv, rotary
positions, GELU. Same contract as ``dllm.model.decoder.Decoder``: ``embed``, ``forward``, ``head``, ``new_store``.

Letters: B batch, Q new rows, N stored keys, H heads, D head width, E model width, V vocabulary.
The noise level is 0 throughout (these models are trained without time conditioning), so that modulations are constants.
``head`` gives raw logits. The SUBS law (mask ruled out, fixed tokens carried over) is the loop's ban of the mask id
and its never touching a fixed slot; ``subs_log_probs`` is the same law as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dllm.model.decoder import rotate
from dllm.model.kv_store import KVStore
from dllm.types import Attend

TIME_FEATURES = 256
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class DiTConfig:
    """Shape of the backbone. conditioning_size: width of the noise level's vector; adaptive False: no level, no modulation."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    conditioning_size: int
    max_positions: int
    adaptive: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "conditioning_size", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1: got {getattr(self, name)}")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size must be a multiple of 2 * num_heads = {2 * self.num_heads}: got {self.hidden_size}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class LayerNorm(nn.Module):
    """Mean and variance in fp32, a weight and no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), (x.shape[-1],), self.weight.float()).to(x.dtype)


class NoiseLevel(nn.Module):
    """silu(MLP(sinusoids of sigma)) at sigma = 0: one vector [C]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(TIME_FEATURES, width)
        self.outer = nn.Linear(width, width)

    def forward(self) -> Tensor:
        weight = self.inner.weight
        # At sigma 0 every cosine is 1 and every sine 0; the cosines stand first.
        waves = torch.zeros(TIME_FEATURES, dtype=weight.dtype, device=weight.device)
        waves[: TIME_FEATURES // 2] = 1
        return F.silu(self.outer(F.silu(self.inner(waves))))


class DiTBlock(nn.Module):
    """x + gate * attention(modulated norm(x)), then the same with the MLP."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_heads
        self.attention_norm, self.mlp_norm = LayerNorm(width), LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_up, self.mlp_down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(config.conditioning_size, 6 * width) if config.adaptive else None

    def forward(
        self,
        x: Tensor,
        level: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, Q, E], mask [B, 1, Q, N + Q] bool -> (x, k, v): the residual stream, rotated keys and values [B, H, Q, D]."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = _modulation(self.modulation, level, 6)
        fused = self.qkv(_modulate(self.attention_norm(x), shift_a, scale_a))
        q, k, v = rearrange(fused, "b q (three h d) -> three b h q d", three=3, h=self.heads).unbind(0)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys, values = (k, v) if past is None else (torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + gate_a * self.out(rearrange(mixed, "b h q d -> b q (h d)"))
        inner = F.gelu(self.mlp_up(_modulate(self.mlp_norm(x), shift_m, scale_m)), approximate="tanh")
        return x + gate_m * self.mlp_down(inner), k, v


def _modulation(linear: nn.Linear | None, level: Tensor | None, parts: int) -> tuple[Any, ...]:
    """The ``parts`` vectors [E] of a layer, or neutral numbers where nothing is adaptive; in threes: shift, scale, gate."""
    if linear is None or level is None:
        return (0.0, 0.0, 1.0, 0.0, 0.0, 1.0)[:parts]
    return linear(level).chunk(parts, dim=-1)


def _modulate(x: Tensor, shift: Any, scale: Any) -> Tensor:
    return x * (1 + scale) + shift


class DiT(nn.Module):
    """Embedding, blocks, modulated final norm; and apart from them the head, which has a bias."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.noise_level = NoiseLevel(config.conditioning_size) if config.adaptive else None
        self.layers = nn.ModuleList(DiTBlock(config) for _ in range(config.num_layers))
        self.norm = LayerNorm(config.hidden_size)
        self.norm_modulation = nn.Linear(config.conditioning_size, 2 * config.hidden_size) if config.adaptive else None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)

    def _frequencies(self) -> Tensor:
        width = self.config.head_dim
        return 1.0 / (ROPE_THETA ** (torch.arange(0, width, 2, dtype=torch.float32) / width))

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the buffers that no checkpoint stores, on ``device``."""
        self.inv_freq = self._frequencies().to(device)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, E]; the head adds ``head_bias`` [V]."""
        return self.lm_head.weight

    @property
    def head_bias(self) -> Tensor:
        return self.lm_head.bias

    def new_store(self, batch: int, capacity: int) -> KVStore:
        """An empty store for ``batch`` sequences of at most ``capacity`` rows, in this model's dtype and device."""
        c = self.config
        return KVStore(c.num_layers, batch, c.num_heads, capacity, c.head_dim, self.dtype, self.device)

    def embed(self, ids: Tensor, masked: Tensor | None = None, mask_token_id: int | None = None) -> Tensor:
        """ids [B, Q] int64 -> [B, Q, E]; rows where masked [B, Q] take the mask's input row, whatever their id says."""
        if masked is None:
            return self.embed_tokens(ids)
        if mask_token_id is None:
            raise ValueError("mask_token_id must be given with masked: got None")
        return self.embed_tokens(ids.masked_fill(masked, mask_token_id))

    def forward(
        self,
        ids: Tensor | None,
        positions: Tensor,
        kv: KVStore | None,
        attend: Attend | Tensor,
        taps: Sequence[int] = (),
        *,
        embeds: Tensor | None = None,
        rows: Tensor | None = None,
        write: Tensor | None = None,
    ) -> Any:
        """Hidden states of the new rows after the modulated final norm, as ``Decoder.forward``."""
        if (ids is None) == (embeds is None):
            raise ValueError("exactly one of ids and embeds must be given")
        x = self.embed(ids) if embeds is None else embeds  # type: ignore[arg-type]
        mask = (attend.mask() if isinstance(attend, Attend) else attend)[:, None]
        angles = positions[:, None, :, None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        level = None if self.noise_level is None else self.noise_level()
        tapped = []
        for index, layer in enumerate(self.layers):
            x, k, v = layer(x, level, cos, sin, mask, None if kv is None else kv.view(index))
            if kv is not None and write is not None:
                assert rows is not None, "write needs rows"
                kv.write(index, rows, write, k, v)
            if index in taps:
                tapped.append(x)
        hidden = _modulate(self.norm(x), *_modulation(self.norm_modulation, level, 2))
        return (hidden, tapped) if taps else hidden

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..., E] -> raw logits [..., V] in the model's dtype."""
        return self.lm_head(hidden)


def subs_log_probs(logits: Tensor, input_ids: Tensor, mask_token_id: int) -> Tensor:
    """The SUBS law (Sahoo et al. 2024, section 3.2.3): raw logits [B, L, V], input_ids [B, L] -> log-probabilities
    [B, L, V].

    The mask has probability 0 and a position that is not masked keeps its token. Zero probability is -1e6, as
    published.
    """
    ruled_out = logits.float().clone()
    ruled_out[..., mask_token_id] -= 1e6
    out = ruled_out.log_softmax(-1)
    fixed = torch.full_like(out, -1e6).scatter(-1, input_ids[..., None], 0.0)
    return torch.where((input_ids == mask_token_id)[..., None], out, fixed)
