"""A range of layers: a whole model, or one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from potluck.core.errors import InputError
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
from potluck.engine.numbers.matrix import Matrix, Norm, across, product

Mixer = Callable[[Norm, Tensor, Kept, BatchLayout, RopeAngles, Tensor | None], Tensor]
"""The last argument says for which tokens the result is wanted; None: for all."""
OnLayer = Callable[[int], None]


class Stack:
    """Layers [first, last) of a model, with the embedding before the first and the head behind the last."""

    def __init__(self, config: EngineModelConfig, load: LayerLoader, first: int, last: int) -> None:
        model = config.model
        if not 0 <= first < last <= model.layer_count:
            raise InputError("layers", f"{first} to {last} is no range of the model's {model.layer_count}")
        self.first, self.last = first, last
        self._layers = [_Layer(config, index, load) for index in range(first, last)]
        self._angles = {
            dim: angles(config.rope, dim, model.max_context_tokens).to(load.device)
            for dim in self._dims(config)
        }
        top = load.under("model")
        head = not model.tied_embeddings and last == model.layer_count
        whole = first == 0 or (last == model.layer_count and not head)
        embedding = top.take("embed_tokens.weight", model.vocab, model.hidden) if whole else None
        self._embedding = embedding if first == 0 else None
        self._norm: Norm | None = None
        self._head: Matrix | None = None
        if last == model.layer_count:
            self._norm = Norm(top.norm("norm.weight", model.hidden), config.norm_eps)
            weight = load.take("lm_head.weight", model.vocab, model.hidden) if head else embedding
            assert weight is not None
            self._head = across(weight)

    def _dims(self, config: EngineModelConfig) -> set[int]:
        dims = set()
        for layer in config.model.layers[self.first : self.last]:
            if isinstance(layer.attention, FullAttention):
                dims.add(rotated(config, layer.attention))
            elif isinstance(layer.attention, LatentAttention):
                dims.add(layer.attention.qk_rope_head_dim)
        return dims

    @property
    def embeds(self) -> bool:
        return self._embedding is not None

    @property
    def has_head(self) -> bool:
        return self._head is not None

    def embed(self, tokens: Tensor) -> Tensor:
        assert self._embedding is not None
        return F.embedding(tokens, self._embedding)

    def __call__(
        self, x: Tensor, batch_layout: BatchLayout, cache: LayerCaches, on_layer: OnLayer | None
    ) -> Tensor:
        """Hidden states in, hidden states out; `on_layer` hears of each layer whose cache entries are complete. Where
        the head is, only states of tokens whose logits are wanted come out, in that order."""
        rope_angles = RopeAngles(self._angles, batch_layout.positions)
        for index, layer in enumerate(self._layers):
            last = self.has_head and index == len(self._layers) - 1
            x = layer(
                x, cache.layers[index], batch_layout, rope_angles, batch_layout.wanted if last else None
            )
            if on_layer is not None:
                on_layer(self.first + index)
        return x

    def logits(self, x: Tensor) -> Tensor:
        assert self._norm is not None
        assert self._head is not None
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
