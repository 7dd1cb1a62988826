"""All layers of a model, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from potluck.core.values.model import (
    Attention,
    DenseFfn,
    Ffn,
    FullAttention,
    LatentAttention,
    LinearAttention,
)
from potluck.engine.compute.batch_layout import BatchLayout
from potluck.engine.memory.kv_cache import Kept, LayerCaches
from potluck.engine.model.attention import FullLayer, LatentLayer, rotated
from potluck.engine.model.checkpoint import LayerLoader
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.model.ffn import DenseLayer, MoeLayer
from potluck.engine.model.linear_attention import LinearLayer
from potluck.engine.model.rope import RopeAngles, angles
from potluck.engine.numbers.matrix import Norm, across, product

Mixer = Callable[[Norm, Tensor, Kept, BatchLayout, RopeAngles, Tensor | None], Tensor]
"""The last argument says for which tokens the result is wanted; None: for all."""
OnLayer = Callable[[int], None]


class Stack:
    """A model's embedding, layers and head."""

    def __init__(self, config: EngineModelConfig, load: LayerLoader) -> None:
        model = config.model
        self._layers = [_Layer(config, index, load) for index in range(model.layer_count)]
        self._angles = {
            dim: angles(config.rope, dim, model.max_context_tokens).to(load.device)
            for dim in self._dims(config)
        }
        top = load.under("model")
        self._embedding = top.take("embed_tokens.weight", model.vocab, model.hidden)
        self._norm = Norm(top.norm("norm.weight", model.hidden), config.norm_eps)
        tied = model.tied_embeddings
        self._head = across(
            self._embedding if tied else load.take("lm_head.weight", model.vocab, model.hidden)
        )

    @staticmethod
    def _dims(config: EngineModelConfig) -> set[int]:
        dims = set()
        for layer in config.model.layers:
            if isinstance(layer.attention, FullAttention):
                dims.add(rotated(config, layer.attention))
            elif isinstance(layer.attention, LatentAttention):
                dims.add(layer.attention.qk_rope_head_dim)
        return dims

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._embedding)

    def __call__(
        self, x: Tensor, batch_layout: BatchLayout, cache: LayerCaches, on_layer: OnLayer | None
    ) -> Tensor:
        """Hidden states of the step's tokens in; out those of the tokens whose logits are wanted, in that order.

        `on_layer` is called with the number of each layer whose cache entries are complete.
        """
        rope_angles = RopeAngles(self._angles, batch_layout.positions)
        for index, layer in enumerate(self._layers):
            last = index == len(self._layers) - 1
            x = layer(
                x, cache.layers[index], batch_layout, rope_angles, batch_layout.wanted if last else None
            )
            if on_layer is not None:
                on_layer(index)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return product(x, self._head, norm=self._norm)


class _Layer:
    """Norm and attention, norm and feed-forward, each added to what came in."""

    def __init__(self, config: EngineModelConfig, index: int, load: LayerLoader) -> None:
        layer, hidden = config.model.layers[index], config.model.hidden
        load = load.under(f"model.layers.{index}")
        self._before_mixer = Norm(load.norm("input_layernorm.weight", hidden), config.norm_eps)
        self._before_ffn = Norm(load.norm("post_attention_layernorm.weight", hidden), config.norm_eps)
        self._mixer = _mixer(config, layer.attention, load)
        self._ffn = _ffn(config, layer.ffn, load)

    def __call__(
        self, x: Tensor, kept: Kept, batch_layout: BatchLayout, rope_angles: RopeAngles, wanted: Tensor | None
    ) -> Tensor:
        x = self._mixer(self._before_mixer, x, kept, batch_layout, rope_angles, wanted)
        return self._ffn(self._before_ffn, x) if x.shape[0] else x


def _mixer(config: EngineModelConfig, attention: Attention, load: LayerLoader) -> Mixer:
    if isinstance(attention, LinearAttention):
        return LinearLayer(config, attention, load)
    if isinstance(attention, LatentAttention):
        return LatentLayer(config, attention, load)
    return FullLayer(config, attention, load)


def _ffn(config: EngineModelConfig, part: Ffn, load: LayerLoader) -> Callable[[Norm, Tensor], Tensor]:
    if isinstance(part, DenseFfn):
        return DenseLayer(config.model.hidden, part.intermediate, load.under("mlp"), config.ffn_bias)
    return MoeLayer(config, part, load.under("block_sparse_moe" if config.family == "mixtral" else "mlp"))
