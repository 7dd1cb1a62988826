"""What each kind of engine can run, as data, and the one check of a plan that all commands share.

An engine's limits leave columns out of the planner's program (`plan`), and refuse a plan that was made elsewhere or
earlier wherever it is read. What a template needs is told here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, get_args

from potluck.core.values.layout import Ep, Layout
from potluck.core.values.model import (
    FORMAT_BITS,
    Format,
    FullAttention,
    LinearAttention,
    LinearKind,
    Model,
    MoeFfn,
)
from potluck.core.values.plan import Plan, PlannedReplica, Template
from potluck.core.values.types import Codec, EngineName


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Each field is one ability; the defaults are those of an engine without limits."""

    engine: EngineName
    title: str
    pipelines: bool = True
    """Replicas of several stages, also over several machines."""
    shared_stages: bool = True
    """Several nodes that share the requests of a stage."""
    unlike_degrees: bool = True
    """Stages of one pipeline with unlike tensor-parallel degrees."""
    most_tensor: int | None = None
    """GPUs that a stage is sharded over at most; None: as many as the model's heads allow (`perf`: `check_tp`)."""
    experts: tuple[Ep, ...] = get_args(Ep)
    hands_over_to: tuple[EngineName, ...] = get_args(EngineName)
    """Engines that KV is handed over to; where its own kind is missing, replicas take whole requests."""
    states_over_degrees: bool = True
    """Recurrent and convolution states between replicas of unlike tensor-parallel degrees, as other KV crosses."""
    codecs: tuple[Codec, ...] = get_args(Codec)
    """In which KV crosses between replicas."""
    kv_bits: tuple[float, ...] | None = None
    """Widths of KV in the cache; None: any."""
    stored: tuple[Format, ...] = get_args(Format)
    """Formats of checkpoints that it reads."""
    makes: tuple[Format, ...] = get_args(Format)
    """Formats that it makes of 16-bit weights as it loads."""
    linear: tuple[LinearKind, ...] = get_args(LinearKind)
    sinks: bool = True
    """Attention with a learned sink in each head."""
    full_norm: bool = True
    """A norm of queries and keys over all heads."""
    expert_bias: bool = True

    @property
    def hands_over(self) -> bool:
        """Whether replicas of it hand KV to one another."""
        return self.engine in self.hands_over_to


UNLIMITED: Final = EngineKind("any", "any engine")
FLOATS: Final[tuple[Format, ...]] = ("bf16", "fp16", "fp32")
ENGINES: Final[dict[EngineName, EngineKind]] = {
    "vllm": EngineKind(
        "vllm",
        "vLLM",
        shared_stages=False,
        unlike_degrees=False,
        experts=("none", "tp"),
        hands_over_to=("vllm", "embedded"),
        states_over_degrees=False,
        kv_bits=(8.0, 16.0),
        makes=("fp8", "fp8_block", "mxfp4"),
    ),
    "embedded": EngineKind(
        "embedded",
        "the embedded engine",
        pipelines=False,
        shared_stages=False,
        most_tensor=1,
        experts=("none",),
        hands_over_to=("vllm", "embedded"),
        kv_bits=(16.0,),
        stored=(*FLOATS, "fp8", "fp8_block"),
        makes=(),
        linear=("gated_delta",),
        sinks=False,
        full_norm=False,
        expert_bias=False,
    ),
    "openai": EngineKind(
        "openai", "a server of OpenAI's API", pipelines=False, shared_stages=False, hands_over_to=()
    ),
}


class EngineLimit(NamedTuple):
    ability: str
    """The field that says no."""
    what: str
    """What the engine does not run, as one says it of many."""
    fix: str = ""
    """What keeps it out of a plan, beside another engine."""


STAGES, ONE_GPU = "`limits: {max_stages: 1}`", "nodes of one GPU each (1xL4, not 4xL4)"


def limits_of_model(model: Model, engine_kind: EngineKind) -> Iterator[EngineLimit]:
    """What of a model the engine does not run, however it is laid out."""
    for layer in dict.fromkeys(model.layers):
        attention = layer.attention
        if isinstance(attention, LinearAttention) and attention.kind not in engine_kind.linear:
            yield EngineLimit("linear", f"linear attention of kind {attention.kind}")
        if isinstance(attention, FullAttention) and attention.sinks and not engine_kind.sinks:
            yield EngineLimit("sinks", "attention with sinks")
        if isinstance(attention, FullAttention) and attention.qk_norm == "full" and not engine_kind.full_norm:
            yield EngineLimit("full_norm", "a norm over all attention heads")
        if isinstance(layer.ffn, MoeFfn) and layer.ffn.bias and not engine_kind.expert_bias:
            yield EngineLimit("expert_bias", "experts with biases")
    if engine_kind.kv_bits is not None and model.kv_bits not in engine_kind.kv_bits:
        yield EngineLimit("kv_bits", f"KV of {model.kv_bits:g} bits")


def limit_of_format(planned: Format | None, stored: Format, engine_kind: EngineKind) -> EngineLimit | None:
    """What keeps an engine from serving a checkpoint in a format; `planned` None: as it is stored."""
    if stored not in engine_kind.stored:
        return EngineLimit("stored", f"checkpoints in {stored}")
    if planned is None or planned == stored or FORMAT_BITS[planned] == FORMAT_BITS[stored] == 16:
        return None
    if planned in engine_kind.makes and FORMAT_BITS[stored] == 16:
        return None
    fix = "a checkpoint that is stored so, its directory named as the model"
    return EngineLimit("makes", f"{planned} made of a checkpoint in {stored}", fix)


def limits_of_layout(layout: Layout, engine_kind: EngineKind) -> Iterator[EngineLimit]:
    nodes = [node for stage in layout.stages for node in stage.nodes]
    degrees = sorted({node.tp for node in nodes})
    if len(layout.stages) > 1 and not engine_kind.pipelines:
        yield EngineLimit("pipelines", "pipelines", STAGES)
    if any(len(stage.nodes) > 1 for stage in layout.stages) and not engine_kind.shared_stages:
        yield EngineLimit("shared_stages", "pipelines with several nodes in a stage", STAGES)
    if len(degrees) > 1 and not engine_kind.unlike_degrees:
        yield EngineLimit("unlike_degrees", "pipelines with unlike tensor-parallel degrees", STAGES)
    if engine_kind.most_tensor is not None and degrees[-1] > engine_kind.most_tensor:
        more = f" over more than {engine_kind.most_tensor} GPUs" if engine_kind.most_tensor > 1 else ""
        yield EngineLimit("most_tensor", f"tensor parallelism{more}", ONE_GPU)
    if any(node.ep not in engine_kind.experts for node in nodes):
        spread = " or ".join(sorted({node.ep for node in nodes} - set(engine_kind.experts)))
        yield EngineLimit("experts", f"experts spread by `ep: {spread}`")


def limit_of_hand_over(
    first_layout: Layout, second_layout: Layout, model: Model, engine_kind: EngineKind
) -> EngineLimit | None:
    """What keeps KV of one replica from another."""
    if not engine_kind.hands_over:
        return EngineLimit("hands_over_to", "KV handed over between replicas")
    if engine_kind.states_over_degrees:
        return None
    ways = [
        {node.tp for stage in layout.stages for node in stage.nodes}
        for layout in (first_layout, second_layout)
    ]
    if ways[0] == ways[1]:
        return None
    between = "recurrent states handed over between unlike tensor-parallel degrees"
    states = any(isinstance(layer.attention, LinearAttention) for layer in model.layers)
    return EngineLimit("states_over_degrees", between) if states else None


def _unlike(replicas: Iterable[PlannedReplica]) -> Iterable[PlannedReplica]:
    """Each replica that is there several times once: layouts are slow to compare."""
    return {id(replica): replica for replica in replicas}.values()


def hand_overs(template: Template) -> set[tuple[Layout, Layout]]:
    """Which replicas of a template give KV to which: as was planned, else those that prefill to those that decode.

    Of a phase alone the KV goes to some other template, or comes from one: at least to and from its like.
    """
    replicas = template.replicas
    if template.flows:
        pairs = {(flow.prefill, flow.decode) for flow in template.flows if flow.prefill != flow.decode}
        return {(replicas[i].layout, replicas[j].layout) for i, j in pairs}
    by_role: dict[str, set[Layout]] = {}
    for replica in _unlike(replicas):
        by_role.setdefault(replica.role, set()).add(replica.layout)
    givers = by_role.get("prefill") or by_role.get("decode", set())
    takers = by_role.get("decode") or by_role.get("mixed") or givers
    return {(first_layout, second_layout) for first_layout in givers for second_layout in takers}


def limits_of_template(template: Template, model: Model, engine_kind: EngineKind) -> tuple[EngineLimit, ...]:
    """What of a template an engine does not do, each once; nothing where it runs it. The model itself is apart."""
    if engine_kind == UNLIMITED:
        return ()
    layouts = dict.fromkeys(replica.layout for replica in _unlike(template.replicas))
    limits = [limit for layout in layouts for limit in limits_of_layout(layout, engine_kind)]
    limits += _between(hand_overs(template), model, engine_kind)
    if template.hands_over and template.codec not in engine_kind.codecs:
        limits.append(EngineLimit("codecs", f"KV in {template.codec}", "`kv_codecs: [raw]`"))
    return tuple(dict.fromkeys(limits))


def _between(
    pairs: Iterable[tuple[Layout, Layout]], model: Model, engine_kind: EngineKind
) -> list[EngineLimit]:
    limits = (
        limit_of_hand_over(first_layout, second_layout, model, engine_kind)
        for first_layout, second_layout in pairs
    )
    return [limit for limit in limits if limit is not None]


class BrokenLimit(NamedTuple):
    """Something of a plan that an engine does not do."""

    where: str
    limit: EngineLimit
    model: Model
    templates: tuple[Template, ...]
    """Those that need it; empty: the model does, however it is laid out."""


def broken_limits(plan: Plan, models: Mapping[str, Model], engine_kind: EngineKind) -> Iterator[BrokenLimit]:
    for name, model in models.items() if engine_kind != UNLIMITED else ():
        mine = [template for template in plan.repertoire if template.model == name]
        for limit in dict.fromkeys(limits_of_model(model, engine_kind)):
            yield BrokenLimit(name, limit, model, ())
        for template in mine:
            for limit in limits_of_template(template, model, engine_kind):
                yield BrokenLimit(template.name, limit, model, (template,))
        # Of templates of one phase each, any may hand over to any other.
        apart = [template for template in mine if is_one_phase(template)]
        for first_template in (template for template in apart if template.replicas[0].role == "prefill"):
            for second_template in (template for template in apart if template.replicas[0].role == "decode"):
                ends = first_template.replicas[0].layout, second_template.replicas[0].layout
                between = limit_of_hand_over(*ends, model, engine_kind)
                if between is not None and engine_kind.hands_over:
                    yield BrokenLimit(
                        f"{first_template.name} to {second_template.name}",
                        between,
                        model,
                        (first_template, second_template),
                    )


def refusals(plan: Plan, models: Mapping[str, Model], engine_kind: EngineKind) -> tuple[str, ...]:
    """A line for all of a plan that an engine does not do, with what would help; nothing where it runs all."""
    return tuple(_line(broken, engine_kind) for broken in broken_limits(plan, models, engine_kind))


def _line(broken: BrokenLimit, engine_kind: EngineKind) -> str:
    able = engines_for(broken.templates, broken.model)
    fixes = [*(f"`engine: {name}`" for name in able), *((broken.limit.fix,) if broken.limit.fix else ())]
    again = f"plan again, with {' or '.join(fixes)}" if fixes else "plan again"
    return f"{broken.where}: needs {broken.limit.what}, which {engine_kind.title} does not do; {again}"


def is_one_phase(template: Template) -> bool:
    return {replica.role for replica in template.replicas} in ({"prefill"}, {"decode"})


def engines_for(templates: Iterable[Template], model: Model) -> tuple[EngineName, ...]:
    """Engines that run a model laid out in all of these ways."""
    ways = list(templates)
    return tuple(
        name
        for name, engine_kind in ENGINES.items()
        if not any(limits_of_model(model, engine_kind))
        and not any(limits_of_template(template, model, engine_kind) for template in ways)
    )
