"""The gated feed-forward part: down(silu(gate x) * up x).

Both projections are kept negated. With n = -gate x and m = -up x the product is n m / (1 + exp(n)): no extra pass for
a sign, and silu is made of operations that round alike everywhere (exact.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.core.values.model import MoeFfn
from potluck.engine.model.checkpoint import LayerLoader
from potluck.engine.model.config import EngineModelConfig, ExpertRouting
from potluck.engine.numbers.exact import in_vectors, on_gpu, sigmoid
from potluck.engine.numbers.matrix import (
    TILED,
    Matrix,
    Norm,
    TiledMatrix,
    across,
    add_product,
    feed_forward,
    product,
    thread_count,
)


def negated(gate: Tensor, up: Tensor) -> Matrix:
    """Both side by side, as `gated` wants them."""
    return across(torch.cat([gate, up]).neg_())


def gated(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    packed = product(x, weight, bias)
    half = packed.shape[1] // 2
    if on_gpu(packed):
        from potluck.engine.numbers import triton_kernels

        return triton_kernels.gate(packed)
    if in_vectors(packed, half):
        from potluck.engine.numbers.kernels.rows import gate as compiled_gate

        out = torch.empty(packed.shape[0], half)
        compiled_gate(*out.shape, packed.data_ptr(), 4 * packed.stride(0), out.data_ptr())
        return out
    gate = packed[:, :half]
    return (gate * packed[:, half:]).div_(torch.exp(gate).add_(1))


class DenseLayer:
    def __init__(self, hidden: int, width: int, load: LayerLoader, bias: bool = False) -> None:
        names = ("gate_proj", "up_proj")
        self._weight = negated(*(load.take(f"{name}.weight", width, hidden) for name in names))
        self._bias = torch.cat([load.take(f"{name}.bias", width) for name in names]).neg_() if bias else None
        self._down = across(load.take("down_proj.weight", hidden, width))
        self._fits = not bias and hidden % TILED == 0 and width % TILED == 0
        self._down_bias = load.take("down_proj.bias", hidden) if bias else None

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """x + the feed-forward part of norm(x)."""
        up, down = self._weight, self._down
        if isinstance(up, TiledMatrix) and isinstance(down, TiledMatrix) and self._fits:
            # On several threads the two products are cut by themselves, to the same effect.
            alone = thread_count(x.shape[0] * up.depth * up.padded) == 1
            if alone:
                return feed_forward(x, norm, up, down)
        return self.add(x, norm(x))

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        out = add_product(residual, gated(x, self._weight, self._bias), self._down)
        return out if self._down_bias is None else out.add_(self._down_bias)


def route(logits: Tensor, bias: Tensor | None, routing: ExpertRouting, active: int) -> tuple[Tensor, Tensor]:
    """(experts, weights), both [tokens, active]. A correction bias sways the choice, not the weights."""
    scores = torch.softmax(logits, -1) if routing.scoring == "softmax" else sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        best = grouped.amax(-1) if bias is None else grouped.topk(2, -1)[0].sum(-1)
        out = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.top_groups, -1)[1], False)
        choice = grouped.masked_fill(out[..., None], 0.0 if bias is None else -torch.inf).flatten(1)
    experts = choice.topk(active, -1)[1]
    weights = scores.gather(1, experts)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * routing.scale


class MoeLayer:
    def __init__(self, config: EngineModelConfig, ffn: MoeFfn, load: LayerLoader) -> None:
        self._part, self._routing = ffn, config.routing
        hidden, width = config.model.hidden, ffn.intermediate
        self._router = across(load.take("gate.weight", ffn.experts, hidden).float())
        self._bias = (
            load.take("gate.e_score_correction_bias", ffn.experts).float() if ffn.router_bias else None
        )
        gate, up, down = (
            ("w1", "w3", "w2") if config.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        )
        experts = [load.under(f"experts.{index}") for index in range(ffn.experts)]
        self._weights = [
            negated(expert.take(f"{gate}.weight", width, hidden), expert.take(f"{up}.weight", width, hidden))
            for expert in experts
        ]
        self._downs = [across(expert.take(f"{down}.weight", hidden, width)) for expert in experts]
        self._shared = self._shared_gate = None
        if ffn.shared_intermediate:
            name = "shared_expert" if ffn.shared_gate else "shared_experts"
            self._shared = DenseLayer(hidden, ffn.shared_intermediate, load.under(name))
        if ffn.shared_gate:
            self._shared_gate = across(load.take("shared_expert_gate.weight", 1, hidden))

    def __call__(self, norm: Norm, residual: Tensor) -> Tensor:
        x = norm(residual)
        experts, weights = route(
            product(x.float(), self._router), self._bias, self._routing, self._part.active
        )
        out = residual + self._experts(x, experts, weights.to(x.dtype))
        if self._shared is None:
            return out
        if self._shared_gate is None:
            return self._shared.add(out, x)
        return out + self._shared.add(torch.zeros_like(x), x) * sigmoid(product(x, self._shared_gate))

    def _experts(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Tokens sorted by expert, one product per expert in use, and back; a token's experts add up in its order."""
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        tensor = torch.empty(len(chosen), x.shape[1], dtype=x.dtype, device=x.device)
        first = 0
        for expert, count in enumerate(torch.bincount(chosen, minlength=self._part.experts).tolist()):
            if count:
                places = order[first : first + count]
                rows = gated(x.index_select(0, places // self._part.active), self._weights[expert])
                tensor.index_copy_(0, places, product(rows, self._downs[expert]))
                first += count
        tensor = tensor.view(*experts.shape, -1) * weights[..., None]
        return tensor.sum(1)
