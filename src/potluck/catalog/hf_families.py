"""The stack of layers that each kind of Hugging Face model builds from its `config.json`.

One function per family. Both spellings are understood where the file that a model's makers published and
the one that transformers writes differ. What a family leaves out of the file is filled in as its own
modelling code does, and named beside the line that does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from potluck.catalog.hf_fields import MOST_LAYERS, ConfigFields
from potluck.core.values.model import (
    Attention,
    DenseFfn,
    Ffn,
    FullAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    MoeFfn,
)

Stack = tuple[Layer, ...]
QWEN_WINDOW = 4096
"""Tokens, where a file of Qwen's switches windows on without saying how long they are."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def layer_count(fields: ConfigFields) -> int:
    return fields.count("num_hidden_layers", most=MOST_LAYERS)


def _heads(
    fields: ConfigFields,
    *,
    window: int | None = None,
    bias: bool = False,
    output_bias: bool = False,
    qk_norm: Literal["none", "head", "full"] = "none",
    output_gate: bool = False,
    sinks: bool = False,
) -> FullAttention:
    heads = fields.count("num_attention_heads")
    head_dim = fields.maybe("head_dim")
    if head_dim is None:
        head_dim, rest = divmod(fields.count("hidden_size"), heads)
        if rest or not head_dim:
            raise fields.problem("head_dim is missing and hidden_size is no multiple of num_attention_heads")
    return FullAttention(
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", default=heads),
        head_dim=head_dim,
        v_head_dim=head_dim,
        window=window,
        bias=bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        output_gate=output_gate,
        sinks=sinks,
    )


def _dense(fields: ConfigFields) -> DenseFfn:
    return DenseFfn(fields.count("intermediate_size"))


def _stack(attentions: list[Attention], ffns: list[Ffn]) -> Stack:
    return tuple(Layer(attention, ffn) for attention, ffn in zip(attentions, ffns, strict=True))


def _uniform(fields: ConfigFields, attention: Attention, ffn: Ffn) -> Stack:
    return (Layer(attention, ffn),) * layer_count(fields)


def _windowed(
    fields: ConfigFields,
    build: Callable[[int | None], FullAttention],
    kinds: list[str],
    usual: int | None = None,
) -> list[Attention]:
    """Full and sliding layers after `kinds`; a window that is not given is `usual`, or an error where used."""
    full = build(None)
    if SLIDING not in kinds:
        return [full] * len(kinds)
    sliding = build(fields.count("sliding_window", default=usual))
    return [sliding if kind == SLIDING else full for kind in kinds]


def _qwen_kinds(fields: ConfigFields) -> list[str]:
    """Qwen2 and Qwen3: windows only when switched on, and only from `max_window_layers` up."""
    count = layer_count(fields)
    kinds = fields.words("layer_types", count, (FULL, SLIDING))
    if kinds is not None:
        return kinds
    none = fields.says("sliding_window") and fields.maybe("sliding_window") is None
    if none or not fields.flag("use_sliding_window"):
        return [FULL] * count
    first = fields.number("max_window_layers", 28)
    return [SLIDING if index >= first else FULL for index in range(count)]


def _llama(fields: ConfigFields) -> Stack:
    bias = fields.flag("attention_bias")
    return _uniform(fields, _heads(fields, bias=bias, output_bias=bias), _dense(fields))


def _mistral(fields: ConfigFields) -> Stack:
    window = fields.maybe("sliding_window") if fields.says("sliding_window") else 4096
    return _uniform(fields, _heads(fields, window=window), _dense(fields))


def _phi3(fields: ConfigFields) -> Stack:
    return _uniform(fields, _heads(fields, window=fields.maybe("sliding_window")), _dense(fields))


def _qwen2(fields: ConfigFields) -> Stack:
    attentions = _windowed(
        fields, lambda window: _heads(fields, window=window, bias=True), _qwen_kinds(fields), QWEN_WINDOW
    )
    return _stack(attentions, [_dense(fields)] * len(attentions))


def _qwen3_attention(fields: ConfigFields, kinds: list[str]) -> list[Attention]:
    bias = fields.flag("attention_bias")

    def build(window: int | None) -> FullAttention:
        return _heads(fields, window=window, bias=bias, output_bias=bias, qk_norm="head")

    return _windowed(fields, build, kinds, QWEN_WINDOW)


def _qwen3(fields: ConfigFields) -> Stack:
    attentions = _qwen3_attention(fields, _qwen_kinds(fields))
    return _stack(attentions, [_dense(fields)] * len(attentions))


def _qwen_ffns(fields: ConfigFields, moe: MoeFfn) -> list[Ffn]:
    """Experts on every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    dense_layers = set(fields.integers("mlp_only_layers") or ())
    step = fields.count("decoder_sparse_step", default=1)
    sparse = [index not in dense_layers and (index + 1) % step == 0 for index in range(layer_count(fields))]
    return [moe if is_sparse else _dense(fields) for is_sparse in sparse]


def _experts(fields: ConfigFields) -> tuple[int, int]:
    experts = fields.count("num_experts", "num_local_experts", "n_routed_experts")
    return experts, fields.count("num_experts_per_tok", "num_experts_per_token")


def _qwen3_moe(fields: ConfigFields) -> Stack:
    experts, active = _experts(fields)
    moe = MoeFfn(experts, active, fields.count("moe_intermediate_size"))
    # All layers or none: its code knows neither layer_types nor max_window_layers.
    windows = fields.flag("use_sliding_window") and (
        not fields.says("sliding_window") or fields.maybe("sliding_window") is not None
    )
    kinds = [SLIDING if windows else FULL] * layer_count(fields)
    return _stack(_qwen3_attention(fields, kinds), _qwen_ffns(fields, moe))


def _qwen2_moe(fields: ConfigFields) -> Stack:
    bias = fields.flag("qkv_bias", default=True)
    count = layer_count(fields)
    kinds = fields.words("layer_types", count, (FULL, SLIDING))
    if kinds is None:  # every other layer below `max_window_layers`
        last = fields.number("max_window_layers", 28) if fields.flag("use_sliding_window") else 0
        kinds = [SLIDING if index % 2 == 0 and index < last else FULL for index in range(count)]
    attentions = _windowed(
        fields, lambda window: _heads(fields, window=window, bias=bias), kinds, QWEN_WINDOW
    )
    return _stack(attentions, _qwen_ffns(fields, _shared_moe(fields)))


def _shared_moe(fields: ConfigFields) -> MoeFfn:
    experts, active = _experts(fields)
    return MoeFfn(
        experts,
        active,
        fields.count("moe_intermediate_size"),
        shared_intermediate=fields.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _mixtral(fields: ConfigFields) -> Stack:
    experts, active = _experts(fields)
    attention = _heads(fields, window=fields.maybe("sliding_window"))
    return _uniform(fields, attention, MoeFfn(experts, active, fields.count("intermediate_size")))


def _gpt_oss(fields: ConfigFields) -> Stack:
    count = layer_count(fields)
    bias = fields.flag("attention_bias", default=True)
    kinds = fields.words("layer_types", count, (FULL, SLIDING))
    if kinds is None:  # alternating, the first one sliding
        kinds = [FULL if index % 2 else SLIDING for index in range(count)]
    experts, active = _experts(fields)
    moe = MoeFfn(experts, active, fields.count("intermediate_size"), bias=True)

    def build(window: int | None) -> FullAttention:
        return _heads(fields, window=window, bias=bias, output_bias=bias, sinks=True)

    return _stack(_windowed(fields, build, kinds), [moe] * count)


def _latent(fields: ConfigFields) -> LatentAttention:
    return LatentAttention(
        heads=fields.count("num_attention_heads"),
        kv_lora_rank=fields.count("kv_lora_rank"),
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        qk_rope_head_dim=fields.count("qk_rope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
        q_lora_rank=fields.maybe("q_lora_rank"),
    )


def _deepseek_moe(fields: ConfigFields, *, router_bias: bool) -> MoeFfn:
    experts, active = _experts(fields)
    width = fields.count("moe_intermediate_size")
    shared = fields.maybe("n_shared_experts", "num_shared_experts") or 0
    return MoeFfn(experts, active, width, shared_intermediate=shared * width, router_bias=router_bias)


def _ffns(fields: ConfigFields, moe: MoeFfn, first_dense: int) -> list[Ffn]:
    """Dense layers first, unless the file lists them one by one."""
    count = layer_count(fields)
    kinds = fields.words("mlp_layer_types", count, ("dense", "sparse"))
    if kinds is None:
        dense = fields.number("first_k_dense_replace", first_dense)
        kinds = ["dense" if index < dense else "sparse" for index in range(count)]
    return [moe if kind == "sparse" else _dense(fields) for kind in kinds]


def _deepseek(fields: ConfigFields) -> Stack:
    router_bias = fields.text("model_type") != "deepseek_v2"
    ffns = _ffns(fields, _deepseek_moe(fields, router_bias=router_bias), 0)
    return _stack([_latent(fields)] * len(ffns), ffns)


def _minimax_m2(fields: ConfigFields) -> Stack:
    experts, active = _experts(fields)
    moe = MoeFfn(experts, active, fields.count("intermediate_size"), router_bias=True)
    return _uniform(fields, _heads(fields, qk_norm="full"), moe)


def _mimo_v2_flash(fields: ConfigFields) -> Stack:
    """The published file marks layers with 0 and 1 and names the window layers' own heads."""
    count = layer_count(fields)
    kinds = fields.words("layer_types", count, (FULL, SLIDING)) or _marked(fields, count)
    heads, head_dim = fields.count("num_attention_heads"), fields.count("head_dim")
    v_head_dim = fields.count("v_head_dim")
    kv_heads = fields.count("num_key_value_heads")
    full = FullAttention(heads, kv_heads, head_dim, v_head_dim)
    window = FullAttention(
        heads=fields.count("swa_num_attention_heads", default=heads),
        kv_heads=fields.count("swa_num_key_value_heads", default=2 * kv_heads),
        head_dim=fields.count("swa_head_dim", default=head_dim),
        v_head_dim=fields.count("swa_v_head_dim", default=v_head_dim),
        window=fields.count("sliding_window", "sliding_window_size"),
        sinks=True,
    )
    attentions: list[Attention] = [window if kind == SLIDING else full for kind in kinds]
    moe = _deepseek_moe(fields, router_bias=True)
    marks = fields.integers("moe_layer_freq") if "mlp_layer_types" not in fields else None
    if marks is None:
        return _stack(attentions, _ffns(fields, moe, 1))
    if len(marks) != count:
        raise fields.problem(f"moe_layer_freq has {len(marks)} entries for {count} layers")
    return _stack(attentions, [moe if mark else _dense(fields) for mark in marks])


def _marked(fields: ConfigFields, count: int) -> list[str]:
    marks = fields.integers("hybrid_layer_pattern")
    if marks is None:
        raise fields.problem("layer_types is missing")
    if len(marks) != count:
        raise fields.problem(f"hybrid_layer_pattern has {len(marks)} entries for {count} layers")
    return [SLIDING if mark else FULL for mark in marks]


def _kimi_linear(fields: ConfigFields) -> Stack:
    count = layer_count(fields)
    nested = fields.part("linear_attn_config")
    spec = fields if nested is None else nested
    heads = spec.count("num_heads", "linear_num_heads")
    dim = spec.count("head_dim") if nested is not None else fields.count("linear_head_dim")
    kernel = spec.count("short_conv_kernel_size", "linear_conv_kernel_dim", default=4)
    delta = LinearAttention("kda", heads, heads, dim, dim, conv_kernel=kernel, gate_rank=dim)
    kinds = fields.words("layer_types", count, (FULL, LINEAR))
    if kinds is None:
        full = spec.integers("full_attn_layers")
        if full is None:
            raise fields.problem("linear_attn_config.full_attn_layers is missing")
        kinds = [FULL if index + 1 in full else LINEAR for index in range(count)]  # counted from 1
    attentions: list[Attention] = [_latent(fields) if kind == FULL else delta for kind in kinds]
    return _stack(attentions, _ffns(fields, _deepseek_moe(fields, router_bias=True), 1))


def _qwen_delta_attention(fields: ConfigFields) -> list[Attention]:
    """Qwen3-Next and Qwen3.5: every `full_attention_interval`-th layer is full, the rest gated delta."""
    count = layer_count(fields)
    kinds = fields.words("layer_types", count, (FULL, LINEAR))
    if kinds is None:
        interval = fields.count("full_attention_interval", default=4)
        kinds = [LINEAR if (index + 1) % interval else FULL for index in range(count)]
    bias = fields.flag("attention_bias")
    full = _heads(fields, bias=bias, output_bias=bias, qk_norm="head", output_gate=True)
    delta = LinearAttention(
        kind="gated_delta",
        key_heads=fields.count("linear_num_key_heads"),
        value_heads=fields.count("linear_num_value_heads"),
        key_head_dim=fields.count("linear_key_head_dim"),
        value_head_dim=fields.count("linear_value_head_dim"),
        conv_kernel=fields.count("linear_conv_kernel_dim", default=4),
    )
    return [full if kind == FULL else delta for kind in kinds]


def _qwen3_next(fields: ConfigFields) -> Stack:
    return _stack(_qwen_delta_attention(fields), _qwen_ffns(fields, _shared_moe(fields)))


def _qwen3_5(fields: ConfigFields) -> Stack:
    attentions = _qwen_delta_attention(fields)
    return _stack(attentions, [_dense(fields)] * len(attentions))


FAMILIES: dict[str, Callable[[ConfigFields], Stack]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek,
    "kimi_linear": _kimi_linear,
    "llama": _llama,
    "mimo_v2_flash": _mimo_v2_flash,
    "minimax_m2": _minimax_m2,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
}
"""Model types that `read_model` knows; multimodal files are read through their `text_config`."""
