"""The same models as plain differentiable functions of whole sequences, without caches, packing or reordering.

Tests hold the engine to it, and the models that ship were trained with it. Tensors are named as
`checkpoint.SafetensorsSource` will look for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.errors import InputError
from potluck.core.values.model import DenseFfn, FullAttention, LatentAttention, LinearAttention, MoeFfn
from potluck.engine.model.checkpoint import RandomSource, WeightSource
from potluck.engine.model.config import OWN_KIND, EngineModelConfig
from potluck.engine.model.ffn import route
from potluck.engine.model.rope import amplitude, frequencies, latent_sharpness


@dataclass(frozen=True, slots=True)
class FreshWeights:
    """Weights to start training from: small and random, norms at 1, decays of every pace."""

    seed: int
    spread: float = 0.02

    @property
    def fingerprint(self) -> str:
        return f"fresh {self.seed} {self.spread!r}"

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith("A_log"):
            return torch.linspace(0.5, 16, shape[0]).log()
        if name.endswith("dt_bias"):  # softplus of it is a step of 0.001 to 0.1
            return torch.logspace(-3, -1, shape[0]).expm1().log()
        if name.endswith("bias"):
            return torch.zeros(shape)
        noise = RandomSource(self.seed).take(name + " fresh", *shape)
        return noise / noise.std() * (0.3 if name.endswith("conv1d.weight") else self.spread)


class ReferenceModel(nn.Module):
    def __init__(self, config: EngineModelConfig, source: WeightSource) -> None:
        super().__init__()
        if config.family != OWN_KIND or config.norm_plus_one:
            raise InputError("model_type", f"only {OWN_KIND} models have a reference")
        self.config = config
        self._source: WeightSource | None = source
        self._tensors: dict[str, nn.Parameter] = {}
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        with torch.no_grad():
            self(tokens)  # whatever the model asks for on its way is what it is made of
        self._source = None
        for name, tensor in self._tensors.items():
            self.register_parameter(name.replace(".", "/"), tensor)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._tensors.items()}

    def _take(self, name: str, *shape: int) -> Tensor:
        if name not in self._tensors and self._source is not None:
            self._tensors[name] = nn.Parameter(self._source.take(name, *shape).float())
        return self._tensors[name]

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] tokens to [batch, length, vocabulary] logits."""
        model, eps = self.config.model, self.config.norm_eps
        embedding = self._take("model.embed_tokens.weight", model.vocab, model.hidden)
        x = F.embedding(tokens, embedding)
        for index, layer in enumerate(model.layers):
            name = f"model.layers.{index}."
            y = F.rms_norm(x, (model.hidden,), self._take(name + "input_layernorm.weight", model.hidden), eps)
            attention = layer.attention
            if isinstance(attention, FullAttention):
                x = x + self._full(y, attention, name + "self_attn.")
            elif isinstance(attention, LatentAttention):
                x = x + self._latent(y, attention, name + "self_attn.")
            else:
                x = x + self._linear(y, attention, name + "linear_attn.")
            weight = self._take(name + "post_attention_layernorm.weight", model.hidden)
            y = F.rms_norm(x, (model.hidden,), weight, eps)
            ffn = self._dense if isinstance(layer.ffn, DenseFfn) else self._moe
            x = x + ffn(y, layer.ffn, name + "mlp.")  # type: ignore[arg-type]
        x = F.rms_norm(x, (model.hidden,), self._take("model.norm.weight", model.hidden), eps)
        head = embedding if model.tied_embeddings else self._take("lm_head.weight", model.vocab, model.hidden)
        return x @ head.T

    def _project(self, x: Tensor, name: str, out: int, bias: bool = False) -> Tensor:
        weight = self._take(name + ".weight", out, x.shape[-1])
        return F.linear(x, weight, self._take(name + ".bias", out) if bias else None)

    def _turn(self, x: Tensor, size: int) -> Tensor:
        """`x` [batch, length, heads, dim], its first `size` numbers turned by position."""
        rope = self.config.rope
        steps = torch.arange(x.shape[1])[:, None] * frequencies(rope, size).float()
        cos, sin = (y[:, None].to(x.device) * amplitude(rope) for y in (steps.cos(), steps.sin()))
        head, rest = x[..., :size], x[..., size:]
        one, two = (head[..., 0::2], head[..., 1::2]) if rope.interleaved else head.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1)

    def _full(self, x: Tensor, attention: FullAttention, name: str) -> Tensor:
        batch, length, hidden = x.shape
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
        wide = 2 * dim if attention.output_gate else dim
        query = self._project(x, name + "q_proj", heads * wide, attention.bias).view(
            batch, length, heads, wide
        )
        query, gate = query[..., :dim], query[..., dim:]
        key = self._project(x, name + "k_proj", kv_heads * dim, attention.bias).view(
            batch, length, kv_heads, dim
        )
        value = self._project(x, name + "v_proj", kv_heads * dim, attention.bias).view_as(key)
        if attention.qk_norm == "head":
            query = F.rms_norm(query, (dim,), self._take(name + "q_norm.weight", dim), self.config.norm_eps)
            key = F.rms_norm(key, (dim,), self._take(name + "k_norm.weight", dim), self.config.norm_eps)
        size = int(dim * self.config.rope.share)
        query, key = self._turn(query, size), self._turn(key, size)
        key, value = (y.repeat_interleave(heads // kv_heads, 2) for y in (key, value))
        out = self._attend(query, key, value, dim**-0.5, attention.window).reshape(batch, length, heads * dim)
        if attention.output_gate:
            out = out * torch.sigmoid(gate.reshape(batch, length, heads * dim))
        return self._project(out, name + "o_proj", hidden, attention.output_bias)

    def _latent(self, x: Tensor, attention: LatentAttention, name: str) -> Tensor:
        batch, length, hidden = x.shape
        heads, rank = attention.heads, attention.kv_lora_rank
        plain, rotary = attention.qk_nope_head_dim, attention.qk_rope_head_dim
        if attention.q_lora_rank is None:
            query = self._project(x, name + "q_proj", heads * (plain + rotary))
        else:
            low = self._project(x, name + "q_a_proj", attention.q_lora_rank)
            weight = self._take(name + "q_a_layernorm.weight", attention.q_lora_rank)
            low = F.rms_norm(low, low.shape[-1:], weight, 1e-6)
            query = self._project(low, name + "q_b_proj", heads * (plain + rotary))
        query = query.view(batch, length, heads, plain + rotary)
        down = self._project(x, name + "kv_a_proj_with_mqa", rank + rotary)
        latent = F.rms_norm(down[..., :rank], (rank,), self._take(name + "kv_a_layernorm.weight", rank), 1e-6)
        expanded = self._project(latent, name + "kv_b_proj", heads * (plain + attention.v_head_dim))
        expanded = expanded.view(batch, length, heads, plain + attention.v_head_dim)
        shared = self._turn(down[..., None, rank:], rotary).expand(-1, -1, heads, -1)
        query = torch.cat([query[..., :plain], self._turn(query[..., plain:], rotary)], -1)
        key = torch.cat([expanded[..., :plain], shared], -1)
        scale = (plain + rotary) ** -0.5 * latent_sharpness(self.config.rope)
        out = self._attend(query, key, expanded[..., plain:], scale, None)
        return self._project(out.reshape(batch, length, -1), name + "o_proj", hidden)

    def _linear(self, x: Tensor, attention: LinearAttention, name: str) -> Tensor:
        batch, length, hidden = x.shape
        key_heads, heads = attention.key_heads, attention.value_heads
        key_dim, dim = attention.key_head_dim, attention.value_head_dim
        mixed = self._project(x, name + "in_proj_qkv", attention.conv_channels)
        conv = self._take(name + "conv1d.weight", attention.conv_channels, 1, attention.conv_kernel)
        padded = F.pad(mixed.transpose(1, 2), (attention.conv_kernel - 1, 0))
        mixed = F.conv1d(padded, conv, groups=attention.conv_channels)
        mixed = F.silu(mixed.transpose(1, 2))
        keys = key_heads * key_dim
        query, key, value = mixed[..., :keys], mixed[..., keys : 2 * keys], mixed[..., 2 * keys :]
        query, key = (y.reshape(batch, length, key_heads, key_dim) for y in (query, key))
        query, key = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (query, key))
        query, key = (y.repeat_interleave(heads // key_heads, 2) for y in (query * key_dim**-0.5, key))
        value = value.reshape(batch, length, heads, dim)
        rate = torch.sigmoid(self._project(x, name + "in_proj_b", heads))
        pace = self._project(x, name + "in_proj_a", heads) + self._take(name + "dt_bias", heads)
        decay = torch.exp(-self._take(name + "A_log", heads).exp() * F.softplus(pace))
        recur = self._recur(query, key, value, decay, rate)
        gate = self._project(x, name + "in_proj_z", heads * dim)
        out = F.rms_norm(recur, (dim,), self._take(name + "norm.weight", dim), self.config.norm_eps)
        return self._project(out.reshape(batch, length, -1) * F.silu(gate), name + "out_proj", hidden)

    def _recur(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """The gated delta rule, token by token; `decay` and `rate` are [batch, length, heads]."""
        batch, length, heads, dim = value.shape
        state, result = value.new_zeros(batch, heads, key.shape[-1], dim), []
        for t in range(length):
            state = state * decay[:, t, :, None, None]
            error = value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], error * rate[:, t, :, None])
            result.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
        return torch.stack(result, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """All [batch, length, heads, dim]; each query sees itself and what is before it, within the window."""
        places = torch.arange(query.shape[1], device=query.device)
        seen = places[:, None] >= places
        if window is not None:
            seen &= places[:, None] - places < window
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value)

    def _dense(self, x: Tensor, part: DenseFfn, name: str) -> Tensor:
        return self._gated(x, name, part.intermediate, self.config.ffn_bias)

    def _gated(self, x: Tensor, name: str, width: int, bias: bool = False) -> Tensor:
        gate = self._project(x, name + "gate_proj", width, bias)
        up = self._project(x, name + "up_proj", width, bias)
        return self._project(F.silu(gate) * up, name + "down_proj", x.shape[-1], bias)

    def _moe(self, x: Tensor, ffn: MoeFfn, name: str) -> Tensor:
        """Every expert sees every token; those that were not chosen count nothing."""
        flat = x.flatten(0, 1)
        bias = self._take(name + "gate.e_score_correction_bias", ffn.experts) if ffn.router_bias else None
        logits = self._project(flat, name + "gate", ffn.experts)
        experts, weights = route(logits, bias, self.config.routing, ffn.active)
        shares = torch.zeros(len(flat), ffn.experts).to(weights).scatter(1, experts, weights)
        out = torch.zeros_like(flat)
        for index in range(ffn.experts):
            expert = self._gated(flat, f"{name}experts.{index}.", ffn.intermediate)
            out = out + shares[:, index, None] * expert
        if ffn.shared_intermediate:
            kind = "shared_expert." if ffn.shared_gate else "shared_experts."
            shared = self._gated(flat, name + kind, ffn.shared_intermediate)
            if ffn.shared_gate:
                shared = shared * torch.sigmoid(self._project(flat, name + "shared_expert_gate", 1))
            out = out + shared
        return out.view_as(x)
