"""Sparse mixture of experts with grouped, bias-corrected routing (DeepSeek-AI 2024, arXiv:2412.19437, as LLaDA2 uses
it).

Letters: T tokens, X experts, k chosen experts, E model width, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm.model.decoder import SwiGLU


@dataclass(frozen=True)
class MoEConfig:
    """Experts of a layer. first_dense: leading layers with an ordinary MLP; scaling: factor on the routed sum.

    Experts are in ``num_groups`` equal groups, of which ``groups_per_token`` may be chosen from; shared experts see
    every token and act as one MLP of ``num_shared`` times the expert width. normalize: weights of a token add up to one
    before scaling.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared: int = 0
    num_groups: int = 1
    groups_per_token: int = 1
    scaling: float = 1.0
    normalize: bool = True
    first_dense: int = 0

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "intermediate_size", "num_groups", "groups_per_token"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1: got {getattr(self, name)}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_experts must be a multiple of num_groups {self.num_groups}: got {self.num_experts}")
        open_experts = self.groups_per_token * (self.num_experts // self.num_groups)
        if self.groups_per_token > self.num_groups or self.experts_per_token > open_experts:
            raise ValueError(
                f"experts_per_token must be <= {open_experts}, the experts of groups_per_token groups, and groups_per_token "
                f"<= num_groups {self.num_groups}: got {self.experts_per_token} and {self.groups_per_token}"
            )

    def is_sparse(self, layer_index: int) -> bool:
        """Does this layer have experts."""
        return layer_index >= self.first_dense


def route(logits: Tensor, bias: Tensor, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """Router logits [T, X] fp32 and choice bias [X] -> (experts [T, k] int64, weights [T, k] fp32).

    Scores are sigmoids. The bias counts for the choice only: groups are ranked by the sum of their two best biased
    scores, then the k best biased scores of the chosen groups win; the weights are their unbiased scores.
    """
    scores = logits.sigmoid()
    biased = scores + bias
    if config.num_groups > 1:
        grouped = biased.view(-1, config.num_groups, config.num_experts // config.num_groups)
        rank = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        best = rank.topk(config.groups_per_token, dim=-1).indices
        is_open = torch.zeros_like(rank, dtype=torch.bool).scatter(1, best, True)
        biased = grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(1)
    experts = biased.topk(config.experts_per_token, dim=-1).indices
    weights = scores.gather(1, experts)
    if config.normalize and config.experts_per_token > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * config.scaling


def experts_reference(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """sum_j weights[t, j] * down_e(silu(gate_e(x_t)) * up_e(x_t)), e = experts[t, j], one expert after another.

    x [T, E]; experts, weights [T, k]; gate_up [X, 2 * I, E]; down [X, E, I] -> [T, E] in x's dtype, summed in fp32.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        part = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, token, part.float() * weights[token, slot, None])
    return out.to(x.dtype)


def experts_grouped(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same sum by two grouped products over rows sorted by expert: no shape depends on data, no host sync.

    For bf16 on CUDA, where ``torch.nn.functional.grouped_mm`` has a kernel.
    """
    per_token = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    token = order // per_token
    counts = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten(), dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    part = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    out.index_add_(0, token, part.float() * weights.flatten()[order, None])
    return out.to(x.dtype)


class SparseMoE(nn.Module):
    """Routed experts plus shared ones; router scores in fp32."""

    fp32_names = frozenset({"expert_bias"})
    """Parameters that keep fp32 whatever the model's dtype: rounding the bias would change the choice."""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        width = config.intermediate_size
        self.router = nn.Linear(hidden_size, config.num_experts, bias=False)
        self.expert_bias = nn.Parameter(torch.zeros(config.num_experts))
        self.experts_gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * width, hidden_size))
        self.experts_down = nn.Parameter(torch.empty(config.num_experts, hidden_size, width))
        self.shared = SwiGLU(hidden_size, config.num_shared * width) if config.num_shared else None
        for weight in (self.experts_gate_up, self.experts_down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def router_logits(self, x: Tensor) -> Tensor:
        """x [..., E] -> fp32 [..., X]."""
        return F.linear(x.float(), self.router.weight.float())

    def forward(self, x: Tensor) -> Tensor:
        """x [B, Q, E] -> [B, Q, E]."""
        flat = x.reshape(-1, x.shape[-1])
        experts, weights = route(self.router_logits(flat), self.expert_bias.float(), self.config)
        grouped = x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")
        run = experts_grouped if grouped else experts_reference
        out = run(flat, experts, weights, self.experts_gate_up, self.experts_down).view_as(x)
        return out if self.shared is None else out + self.shared(x)
