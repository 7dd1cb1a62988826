"""A model from a Hugging Face `config.json`: the file itself or the directory that holds it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values import model

Stack = tuple[model.Layer, ...]
QWEN_WINDOW = 4096  # Tokens, where a file of Qwen's switches windows on without saying how long they are.
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
) -> model.FullAttention:
    heads = fields.count("num_attention_heads")
    head_dim = fields.maybe("head_dim")
    if head_dim is None:
        head_dim, rest = divmod(fields.count("hidden_size"), heads)
        if rest or not head_dim:
            raise fields.problem("head_dim is missing and hidden_size is no multiple of num_attention_heads")
    return model.FullAttention(
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


def _dense(fields: ConfigFields) -> model.DenseFfn:
    return model.DenseFfn(fields.count("intermediate_size"))


def _stack(attentions: list[model.Attention], ffns: list[model.Ffn]) -> Stack:
    return tuple(model.Layer(attention, ffn) for attention, ffn in zip(attentions, ffns, strict=True))


def _uniform(fields: ConfigFields, attention: model.Attention, ffn: model.Ffn) -> Stack:
    return (model.Layer(attention, ffn),) * layer_count(fields)


def _windowed(
    fields: ConfigFields,
    build: Callable[[int | None], model.FullAttention],
    kinds: list[str],
    usual: int | None = None,
) -> list[model.Attention]:
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


def _qwen3_attention(fields: ConfigFields, kinds: list[str]) -> list[model.Attention]:
    bias = fields.flag("attention_bias")

    def build(window: int | None) -> model.FullAttention:
        return _heads(fields, window=window, bias=bias, output_bias=bias, qk_norm="head")

    return _windowed(fields, build, kinds, QWEN_WINDOW)


def _qwen3(fields: ConfigFields) -> Stack:
    attentions = _qwen3_attention(fields, _qwen_kinds(fields))
    return _stack(attentions, [_dense(fields)] * len(attentions))


def _qwen_ffns(fields: ConfigFields, moe: model.MoeFfn) -> list[model.Ffn]:
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
    moe = model.MoeFfn(experts, active, fields.count("moe_intermediate_size"))
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


def _shared_moe(fields: ConfigFields) -> model.MoeFfn:
    experts, active = _experts(fields)
    return model.MoeFfn(
        experts,
        active,
        fields.count("moe_intermediate_size"),
        shared_intermediate=fields.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _mixtral(fields: ConfigFields) -> Stack:
    experts, active = _experts(fields)
    attention = _heads(fields, window=fields.maybe("sliding_window"))
    return _uniform(fields, attention, model.MoeFfn(experts, active, fields.count("intermediate_size")))


def _gpt_oss(fields: ConfigFields) -> Stack:
    count = layer_count(fields)
    bias = fields.flag("attention_bias", default=True)
    kinds = fields.words("layer_types", count, (FULL, SLIDING))
    if kinds is None:  # alternating, the first one sliding
        kinds = [FULL if index % 2 else SLIDING for index in range(count)]
    experts, active = _experts(fields)
    moe = model.MoeFfn(experts, active, fields.count("intermediate_size"), bias=True)

    def build(window: int | None) -> model.FullAttention:
        return _heads(fields, window=window, bias=bias, output_bias=bias, sinks=True)

    return _stack(_windowed(fields, build, kinds), [moe] * count)


def _latent(fields: ConfigFields) -> model.LatentAttention:
    return model.LatentAttention(
        heads=fields.count("num_attention_heads"),
        kv_lora_rank=fields.count("kv_lora_rank"),
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        qk_rope_head_dim=fields.count("qk_rope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
        q_lora_rank=fields.maybe("q_lora_rank"),
    )


def _deepseek_moe(fields: ConfigFields, *, router_bias: bool) -> model.MoeFfn:
    experts, active = _experts(fields)
    width = fields.count("moe_intermediate_size")
    shared = fields.maybe("n_shared_experts", "num_shared_experts") or 0
    return model.MoeFfn(experts, active, width, shared_intermediate=shared * width, router_bias=router_bias)


def _ffns(fields: ConfigFields, moe: model.MoeFfn, first_dense: int) -> list[model.Ffn]:
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
    moe = model.MoeFfn(experts, active, fields.count("intermediate_size"), router_bias=True)
    return _uniform(fields, _heads(fields, qk_norm="full"), moe)


def _mimo_v2_flash(fields: ConfigFields) -> Stack:
    """The published file marks layers with 0 and 1 and names the window layers' own heads."""
    count = layer_count(fields)
    kinds = fields.words("layer_types", count, (FULL, SLIDING)) or _marked(fields, count)
    heads, head_dim = fields.count("num_attention_heads"), fields.count("head_dim")
    v_head_dim = fields.count("v_head_dim")
    kv_heads = fields.count("num_key_value_heads")
    full = model.FullAttention(heads, kv_heads, head_dim, v_head_dim)
    window = model.FullAttention(
        heads=fields.count("swa_num_attention_heads", default=heads),
        kv_heads=fields.count("swa_num_key_value_heads", default=2 * kv_heads),
        head_dim=fields.count("swa_head_dim", default=head_dim),
        v_head_dim=fields.count("swa_v_head_dim", default=v_head_dim),
        window=fields.count("sliding_window", "sliding_window_size"),
        sinks=True,
    )
    attentions: list[model.Attention] = [window if kind == SLIDING else full for kind in kinds]
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
    delta = model.LinearAttention("kda", heads, heads, dim, dim, conv_kernel=kernel, gate_rank=dim)
    kinds = fields.words("layer_types", count, (FULL, LINEAR))
    if kinds is None:
        full = spec.integers("full_attn_layers")
        if full is None:
            raise fields.problem("linear_attn_config.full_attn_layers is missing")
        kinds = [FULL if index + 1 in full else LINEAR for index in range(count)]  # counted from 1
    attentions: list[model.Attention] = [_latent(fields) if kind == FULL else delta for kind in kinds]
    return _stack(attentions, _ffns(fields, _deepseek_moe(fields, router_bias=True), 1))


def _qwen_delta_attention(fields: ConfigFields) -> list[model.Attention]:
    """Qwen3-Next and Qwen3.5: every `full_attention_interval`-th layer is full, the rest gated delta."""
    count = layer_count(fields)
    kinds = fields.words("layer_types", count, (FULL, LINEAR))
    if kinds is None:
        interval = fields.count("full_attention_interval", default=4)
        kinds = [LINEAR if (index + 1) % interval else FULL for index in range(count)]
    bias = fields.flag("attention_bias")
    full = _heads(fields, bias=bias, output_bias=bias, qk_norm="head", output_gate=True)
    delta = model.LinearAttention(
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


DTYPE_BITS = {
    "float32": 32.0,
    "float": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "half": 16.0,
    "float8_e4m3fn": 8.0,
}


def read_model(path: str | Path, name: str | None = None) -> model.Model:
    """The model that `config.json` describes; `name` is the directory's unless given.

    Raises InputError in one line for whatever is wrong with the file.
    """
    file = Path(path)
    try:
        if file.is_dir():
            file = file / "config.json"
        exists = file.is_file()
    except (OSError, ValueError) as error:
        raise InputError(str(path), f"is not a usable path ({error})") from error
    if not exists:
        raise InputError(str(path), "has no config.json; give a model's directory or the file itself")
    label = name or (file.resolve().parent.name if file.name == "config.json" else file.stem) or "model"
    beside = file.parent / "hf_quant_config.json"
    return model_from(read_json(file), label, read_json(beside) if beside.is_file() else None)


def model_from(fields: ConfigFields, name: str, modelopt: ConfigFields | None = None) -> model.Model:
    """The model of an opened file; `modelopt` is ModelOpt's file about its weights, where there is one."""
    outer_fields = fields
    kind = fields.text("model_type")
    if kind is None:
        raise fields.problem("model_type is missing")
    inner = fields.part("text_config")
    if kind not in FAMILIES and inner is not None:
        fields, kind = inner, inner.text("model_type") or f"{kind}_text"
    family = FAMILIES.get(kind)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise outer_fields.problem(f"model_type {kind[:60]!r} is not supported; supported are {known}")
    weight_bits, expert_bits, kv_bits, formats = _bits(outer_fields, fields, modelopt)
    try:
        return model.Model(
            name=name,
            hidden=fields.count("hidden_size"),
            vocab=fields.count("vocab_size"),
            layers=family(fields),
            max_context_tokens=fields.count("max_position_embeddings", "model_max_length"),
            tied_embeddings=fields.flag("tie_word_embeddings", outer_fields.flag("tie_word_embeddings")),
            weight_bits=weight_bits,
            expert_bits=expert_bits,
            kv_bits=kv_bits,
            weight_format=formats[0],
            expert_format=formats[1],
        )
    except InputError as error:
        if error.field.startswith(outer_fields.where):
            raise
        # A value that the model itself refuses, such as more active experts than there are.
        raise outer_fields.problem(f"{error.field}: {error.problem}") from error


Formats = tuple[model.Format | None, model.Format | None]


def _bits(
    outer_fields: ConfigFields, fields: ConfigFields, modelopt: ConfigFields | None
) -> tuple[float, float, float, Formats]:
    """(weight, expert, KV) bits from the dtype and the quantisation, and what the first two are."""
    dtype = fields.text("dtype", "torch_dtype") or outer_fields.text("dtype", "torch_dtype") or "bfloat16"
    plain = DTYPE_BITS.get(dtype.removeprefix("torch."))
    if plain is None:
        raise UnknownNameError(f"{outer_fields.where}: dtype", dtype[:60], DTYPE_BITS)
    kv_bits = plain if plain >= 16 else 16.0
    scheme = outer_fields.part("quantization_config") or fields.part("quantization_config")
    if scheme is not None:
        quantised = model.quantised_of(scheme.values, plain, scheme.where)
    elif modelopt is not None:
        quantised = model.quantised_of(model.modelopt_scheme(modelopt.values), plain, modelopt.where)
    else:
        kind: model.Format | None = "fp16" if dtype.removeprefix("torch.") in ("float16", "half") else None
        return plain, plain, kv_bits, (kind, kind)
    kv_bits = kv_bits if quantised.kv_bits is None else quantised.kv_bits
    return (
        quantised.weight_bits,
        quantised.expert_bits,
        kv_bits,
        (quantised.weight_format, quantised.expert_format),
    )


MOST = 1_000_000_000  # No dimension of a model comes near this; a larger number is a mistake.
MOST_LAYERS = 10_000
LARGEST_FILE_BYTES = 16_000_000


class ConfigFields:
    """A JSON object whose members are asked for by name and kind. Several names are alternatives."""

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self._values = values
        self.where = where

    @property
    def values(self) -> Mapping[str, object]:
        return self._values

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def says(self, name: str) -> bool:
        """Whether the file has it, if only as null."""
        return name in self._values

    def problem(self, text: str) -> InputError:
        return InputError(self.where, text)

    def count(self, *names: str, default: int | None = None, most: int = MOST) -> int:
        """A positive integer; missing or null is an error unless there is a default."""
        name, value = self._find(names)
        if value is None:
            if default is not None:
                return default
            raise self.problem(f"{names[0]} is missing")
        return self._integer(name, value, least=1, most=most)

    def maybe(self, *names: str, least: int = 1) -> int | None:
        """A positive integer, or None where it is missing, null or 0 for `least` 1."""
        name, value = self._find(names)
        if value is None or (value == 0 and not isinstance(value, bool) and least == 1):
            return None
        return self._integer(name, value, least=least, most=MOST)

    def number(self, name: str, default: int, least: int = 0) -> int:
        value = self._values.get(name)
        return default if value is None else self._integer(name, value, least=least, most=MOST)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.problem(f"{name} must be true or false, not {_short(value)}")
        return value

    def text(self, *names: str) -> str | None:
        name, value = self._find(names)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.problem(f"{name} must be a string, not {_short(value)}")
        return value

    def part(self, name: str) -> ConfigFields | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.problem(f"{name} must be an object, not {_short(value)}")
        return ConfigFields(value, f"{self.where}: {name}")

    def words(self, name: str, length: int, choices: tuple[str, ...]) -> list[str] | None:
        """A list with one of `choices` per layer."""
        items = self._list(name)
        if items is None:
            return None
        words: list[str] = []
        for item in items:
            if not isinstance(item, str) or item not in choices:
                raise self.problem(f"{name} has {_short(item)}; known are {', '.join(choices)}")
            words.append(item)
        if len(words) != length:
            raise self.problem(f"{name} has {len(words)} entries for {length} layers")
        return words

    def integers(self, name: str) -> list[int] | None:
        """A list of integers that are not negative, such as layer numbers."""
        items = self._list(name)
        return None if items is None else [self._integer(name, item, 0, MOST) for item in items]

    def _list(self, name: str) -> list[object] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.problem(f"{name} must be a list, not {_short(value)}")
        return value

    def _find(self, names: tuple[str, ...]) -> tuple[str, object]:
        for name in names:
            if self._values.get(name) is not None:
                return name, self._values[name]
        return names[0], None

    def _integer(self, name: str, value: object, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.problem(f"{name} must be an integer, not {_short(value)}")
        if not least <= value <= most:
            raise self.problem(f"{name} must be {least} to {most}, not {_short(value)}")
        return value


def read_json(path: Path) -> ConfigFields:
    where = path.name
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise InputError(where, "is too large for a model's configuration")
        document: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror or error})") from error
    except RecursionError as error:
        raise InputError(where, "is nested too deeply") from error
    except ValueError as error:  # broken JSON, broken UTF-8, a number of thousands of digits
        reason = str(error).splitlines()[0][:120]
        raise InputError(where, f"is not JSON ({reason})") from error
    if not isinstance(document, dict):
        raise InputError(where, f"must be a JSON object, not {_short(document)}")
    return ConfigFields(document, where)


def _short(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return "a number of that size"  # a huge integer may have no decimal text at all
    text = json.dumps(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
