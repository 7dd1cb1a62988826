"""Multi-head latent attention (DeepSeek): per token one compressed latent and one rotary key, shared by all heads.

With the latent c of a token, head h has the key K_h c and the value V_h c. Instead of expanding every token of the
context, the query goes down to the latent: q (K_h c) = (q K_h) c, and the weighted latents come up through V_h at
the end ("absorbed"). So all heads share one key head, the latent and the rotary key side by side, which is its own
value: what the rotary part adds to the output is cut off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.core.values.model import LatentAttention
from potluck.engine.compute.batch_layout import BatchLayout
from potluck.engine.memory.kv_cache import Kept, Pages
from potluck.engine.model.attention.paged import attend
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.model.loading import LayerLoader
from potluck.engine.model.rope import RopeAngles, halves_apart, latent_sharpness, turn
from potluck.engine.numbers.exact import per_head, rms_norm
from potluck.engine.numbers.matrix import Norm, across, add_product, product

LATENT_NORM_EPS = 1e-6
"""The norms inside take this, whatever the model's own is."""


class LatentLayer:
    def __init__(self, config: EngineModelConfig, part: LatentAttention, load: LayerLoader) -> None:
        self._part = part
        hidden, heads, rank = config.model.hidden, part.heads, part.kv_lora_rank
        plain, rotary = part.qk_nope_head_dim, part.qk_rope_head_dim
        self._scale = (plain + rotary) ** -0.5 * latent_sharpness(config.rope)
        load = load.under("self_attn")
        pairs = halves_apart(config.rope, rotary, rotary)
        both = torch.cat([torch.arange(plain), plain + pairs])
        down = load.take("kv_a_proj_with_mqa.weight", rank + rotary, hidden)
        down = torch.cat([down[:rank], down[rank:][pairs]])
        self._latent_norm = load.take("kv_a_layernorm.weight", rank)
        width = heads * (plain + rotary)
        if part.q_lora_rank is None:
            query = load.take("q_proj.weight", width, hidden)
            self._up = self._query_norm = None
        else:
            query = load.take("q_a_proj.weight", part.q_lora_rank, hidden)
            self._query_norm = load.take("q_a_layernorm.weight", part.q_lora_rank)
            up = load.take("q_b_proj.weight", width, part.q_lora_rank)
            self._up = across(up.view(heads, plain + rotary, -1)[:, both].flatten(0, 1))
        if self._up is None:
            query = query.view(heads, plain + rotary, hidden)[:, both].flatten(0, 1)
        self._weight = across(torch.cat([down, query]))
        expand = load.take("kv_b_proj.weight", heads * (plain + part.v_head_dim), rank)
        expand = expand.view(heads, plain + part.v_head_dim, rank)
        self._to_latent = expand[:, :plain].contiguous()
        self._from_latent = expand[:, plain:].transpose(1, 2).contiguous()
        self._out = across(load.take("o_proj.weight", hidden, heads * part.v_head_dim))

    def __call__(
        self,
        norm: Norm,
        residual: Tensor,
        kept: Kept,
        step: BatchLayout,
        turned_by: RopeAngles,
        wanted: Tensor | None,
    ) -> Tensor:
        assert isinstance(kept, Pages)
        part, tokens, rank = self._part, residual.shape[0], self._part.kv_lora_rank
        plain, rotary, entry = part.qk_nope_head_dim, part.qk_rope_head_dim, kept.dim
        packed = product(residual, self._weight, norm=norm)
        queries = packed[:, entry:]
        if self._up is not None:
            assert self._query_norm is not None
            queries = product(rms_norm(queries, self._query_norm, LATENT_NORM_EPS), self._up)
        queries = queries.view(tokens, part.heads, plain + rotary)
        latent = rms_norm(packed[:, :rank], self._latent_norm, LATENT_NORM_EPS)
        by = turned_by.by(rotary)
        rotary_keys = turn(packed[:, None, rank:entry].clone(), by)
        group = step.groups[kept.group]
        kept.entries.index_copy_(0, group.slots, torch.cat([latent, rotary_keys[:, 0]], 1))
        lowered = per_head(queries[..., :plain], self._to_latent)
        turned = turn(queries[..., plain:].clone(), by)
        out = attend(torch.cat([lowered, turned], -1)[:, :, None], kept, group.pieces, self._scale)
        latents = out.view(tokens, part.heads, entry)[..., :rank]
        found = add_product(residual, per_head(latents, self._from_latent).reshape(tokens, -1), self._out)
        return found if wanted is None else found.index_select(0, wanted)
