"""From a plan to what a world needs: timers, memory, cards and start-up times, and the Brain's facts.

Everything is worked out once per template and index and then shared by all its copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor

from potluck.core.state.facts import (
    BLOCK_TOKENS,
    FleetFacts,
    GroupFacts,
    ModelFacts,
    ReplicaFacts,
    SplitFacts,
)
from potluck.core.values.kv import codec_ratio, codecs_between, wire_bytes
from potluck.core.values.layout import RTT_S, Layout, layers_between
from potluck.core.values.model import Model
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import Codec, NodeType, Slo
from potluck.perf.kv_capacity import kv_tokens, require_fit, stage_memory
from potluck.perf.linear_fit import ChunkedIterationPredictor, PartialPrefillPredictor, prompt_curve
from potluck.perf.memory import kv_bytes_per_token, state_bytes, weight_bytes, window_bytes_per_token
from potluck.perf.operators.network import HANDOVER_SHARE, Hop
from potluck.perf.phases import decode_knees, decode_step_s
from potluck.perf.startup import startup_s
from potluck.perf.step_timer import StepTimer
from potluck.perf.throughput import RequestLengths, best_mixed_pipeline, best_operating, paced_budget
from potluck.perf.timers import pipeline_timer
from potluck.perf.timers.engine_host import DEFAULT_HOST, EngineHost
from potluck.perf.timers.profile import Profile, ProfileTimer, profile_for
from potluck.perf.timers.roofline import roofline
from potluck.perf.transfer import AlphaBeta, alpha_beta
from potluck.runtime.attached_plan import ASSUMED_FACTS
from potluck.runtime.resolved_plan import DEFAULT_ENGINE, PROMPT_ENGINE, EngineSetup, ResolvedPlan


def group_facts(
    resolved: ResolvedPlan, template: Template, kv_bytes_per_token: float, mean: tuple[float, float]
) -> GroupFacts:
    """How KV gets from each of a group's replicas to each other, over the links between their machines."""
    nodes = {n.machine: n.node for r in template.replicas for s in r.layout.stages for n in s.nodes}
    hops = []
    for i, first in enumerate(template.replicas):
        for j, second in enumerate(template.replicas):
            layers = layers_between(first.layout, second.layout)
            whole = sum(layers.values())
            parts = []
            for (a, b), count in sorted(layers.items()):
                path = machine_path(resolved, (a, nodes[a]), (b, nodes[b]))
                if path is not None:
                    name = f"{a}->{b}" if a != b else ""
                    parts.append((name, path.alpha_s, count / whole / path.beta_bytes_per_s))
            hops.append((i, j, tuple(parts)))
    return GroupFacts(template.model, kv_bytes_per_token, tuple(hops), *mean)


def machine_path(resolved: ResolvedPlan, first: tuple[str, str], second: tuple[str, str]) -> AlphaBeta | None:
    """The way of KV from one machine (its name and type) to another; None within one that has a single GPU."""
    if first[0] == second[0]:
        inside = resolved.node(first[1]).interconnect
        if inside.kind == "none":
            return None
        return AlphaBeta(inside.latency_s, inside.gb_per_s * 1e9 * HANDOVER_SHARE)
    cards = (min(resolved.node(first[1]).network_gbps, resolved.node(second[1]).network_gbps), RTT_S)
    return alpha_beta(*resolved.machine_gbps.get((first[0], second[0]), cards))


CHUNK_STEP = 8
"""Planned chunks are rounded up to this. Coarser steps make every turn of a pipeline longer than planned: with 64
answers of one that was planned close to its TPOT took 7 to 14 % longer, and nearly all were late.
"""
MEAN_TOKENS = (1024.0, 256.0)  # Prompt and answer of a model that nothing is known of.


@dataclass(frozen=True, slots=True)
class KvWeight:
    """What a model's KV weighs on the wire: bytes(t) = growing t + sum of window rates min(t, w), and a state."""

    layers: int
    growing_bytes: float
    windows: tuple[tuple[int, float], ...]
    state_bytes: float
    kv_bits: float
    latent: bool

    def wire_bytes(self, start: int, stop: int, codec: Codec = "fp16") -> float:
        """Bytes of the KV of tokens [start, stop) of a request, with its state; nothing for no tokens."""
        span, ratio = (start, stop), codec_ratio(codec, self.kv_bits, latent=self.latent)
        return wire_bytes(self.growing_bytes, self.windows, self.state_bytes, span, ratio)


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    timer: StepTimer
    total_blocks: int
    startup_s: float
    layers: int
    places: tuple[tuple[str, int], ...]  # The nodes of the copy that it stands on: type and which of them.
    machines: tuple[str, ...]
    gpus: int
    card_gbps: float  # Of all its nodes together.
    inside_bytes_per_s: float  # Between two replicas on one node.
    engine: EngineSetup = DEFAULT_ENGINE
    codec: Codec = "fp16"  # In which its KV goes to others of its copy.
    owners: tuple[str, ...] = ()  # The machine of every layer, where the plan names them.
    names: tuple[str, ...] = ()  # What each of `places` is called, where the plan names all of them.


@dataclass(slots=True)
class ReplicaModels:
    """All kits of the plans seen so far. `learn` is the one mutator."""

    resolved: ResolvedPlan
    block_tokens: int = BLOCK_TOKENS
    """Tokens per prefix block of the requests to come."""
    templates: dict[str, Template] = field(default_factory=dict)
    replica_models: dict[tuple[str, int], ReplicaModel] = field(default_factory=dict)
    kv: dict[str, KvWeight] = field(default_factory=dict)
    codecs: dict[tuple[str, str, str], Codec] = field(default_factory=dict)
    """Of the last plan: (model, from region, to region) to how KV crosses; as it is where it does not say."""
    _models: dict[str, ModelFacts] = field(default_factory=dict)
    _replicas: dict[tuple[str, int], ReplicaFacts] = field(default_factory=dict)
    _splits: dict[str, SplitFacts] = field(default_factory=dict)
    _places: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    _groups: dict[str, GroupFacts] = field(default_factory=dict)
    _made: dict[tuple[str, Layout, EngineSetup], tuple[StepTimer, int]] = field(default_factory=dict)
    """Timer and room of a model's layout: templates differ in counts and roles more than in layouts."""
    _timed: dict[tuple[str, Layout, EngineSetup, bool, float], ReplicaFacts] = field(default_factory=dict)

    def facts(self) -> FleetFacts:
        """The Brain's facts. They grow with every plan learned, so that a new plan's templates are known."""
        links = {(link.source, link.target): link.gbps for link in self.resolved.links}
        return FleetFacts(
            self._models,
            self._replicas,
            self._splits,
            links,
            self.resolved.regions,
            self.resolved.history,
            self._places,
            self.resolved.machine_zones,
            self._groups,
        )

    def learn(self, plan: Plan) -> None:
        self.codecs = codecs_between(plan)
        used = {deployment.template for deployment in plan.deployments}
        for template in plan.repertoire:
            if template.name in self.templates and self.templates[template.name] == template:
                continue
            if template.name in used or template.model in self.resolved.models:
                self._learn(template)

    def _learn(self, template: Template) -> None:
        resolved = self.resolved
        model = resolved.model(template.model)
        if template.model not in self.kv:
            self.kv[template.model] = kv_of(model)
            self._models[template.model] = _model_facts(resolved, template.model, self.block_tokens)
        if not template.hardware_known:
            self._learn_unknown(template)
            return
        mean = resolved.mean_tokens.get(template.model, MEAN_TOKENS)
        longest = longest_in_use(resolved.plan, template.model, model, mean[0])
        placed = places(template, resolved.nodes)
        for index, replica in enumerate(template.replicas):
            engine = resolved.engines.get((template.name, index)) or self._engine(template, index, mean)
            made = self._made.get((template.model, replica.layout, engine))
            if made is None:
                hops = pipeline_timer.layout_hops(replica.layout, resolved.nodes, resolved.machine_gbps)
                profiles = resolved.profiles.get(template.model, ())
                timer = timer_of(model, replica.layout, resolved.nodes, engine.host, hops, profiles)
                room = total_blocks(model, replica.layout, resolved.nodes, sum(mean))
                made = self._made[template.model, replica.layout, engine] = (timer, room)
            timer, blocks = made
            kinds = [resolved.node(node) for node, _ in placed[index]]
            costs = resolved.startups.get(template.model, resolved.startup)
            start = startup_s(weight_bytes(model), max(1, len(kinds)), costs)
            self.replica_models[template.name, index] = ReplicaModel(
                timer,
                blocks,
                start.total_s,
                model.layer_count,
                placed[index],
                tuple(sorted(replica.layout.machines)),
                sum(stage_node.tp for stage in replica.layout.stages for stage_node in stage.nodes),
                sum(kind.network_gbps for kind in kinds),
                min(max(kind.interconnect.gb_per_s, 1.0) for kind in kinds) * 1e9,
                engine,
                template.codec,
                replica.layout.owners if all(replica.layout.owners) else (),
                _names(replica.layout, placed[index]),
            )
            card = self.replica_models[template.name, index].card_gbps
            kind = (template.model, replica.layout, engine, bool(template.flows), card)
            if kind not in self._timed:
                slo = resolved.slos.get(template.model)
                self._timed[kind] = _replica_facts(
                    timer, model, blocks, mean, slo, engine.slots, longest, bool(template.flows), card
                )
            self._replicas[template.name, index] = self._timed[kind]
            self._places[template.name, index] = tuple(f"{node}/{place}" for node, place in placed[index])
        if template.flows and template.machines:
            prompt = max(1, round(mean[0]))
            size = self.kv[template.model].wire_bytes(0, prompt, template.codec) / prompt
            self._groups[template.name] = group_facts(resolved, template, size, mean)
        split = _split_facts(template, self.replica_models, longest)
        if split is not None:
            self._splits[template.name] = split
        self.templates[template.name] = template

    def _learn_unknown(self, template: Template) -> None:
        """A template of servers whose hardware is unknown: no timers and no memory."""
        max_tokens = template.max_model_len or ASSUMED_FACTS.max_tokens
        for index in range(len(template.replicas)):
            self._replicas[template.name, index] = replace(ASSUMED_FACTS, max_tokens=max_tokens)
            self._places[template.name, index] = ()
        self.templates[template.name] = template

    def crossing(self, template: str, first: int, second: int) -> dict[tuple[str, str], float]:
        """Which shares of a request's KV go from which named machine to which, from one replica to another of a copy.

        Empty where the machines have no names.
        """
        replicas = self.templates[template].replicas
        layers = layers_between(replicas[first].layout, replicas[second].layout)
        whole = sum(layers.values())
        return {ends: count / whole for ends, count in layers.items() if ends[0] and ends[1]}

    def _engine(self, template: Template, index: int, mean: tuple[float, float]) -> EngineSetup:
        """One that nothing is said of."""
        resolved, replica = self.resolved, template.replicas[index]
        slo = resolved.slos.get(template.model)
        chunk = planned_chunk(template, index, mean)
        if chunk:
            return replace(DEFAULT_ENGINE, token_budget=min(DEFAULT_ENGINE.token_budget, chunk))
        if replica.role == "prefill" and template.kind != "pair":
            return PROMPT_ENGINE
        if not resolved.paced or slo is None or replica.role != "mixed":
            return DEFAULT_ENGINE
        model, (prompt, answer) = resolved.model(template.model), (max(1, round(value)) for value in mean)
        blocks = total_blocks(model, replica.layout, resolved.nodes, sum(mean))
        room = blocks * BLOCK_TOKENS // (prompt + answer)
        profiles = resolved.profiles.get(template.model, ())
        timer = timer_of(model, replica.layout, resolved.nodes, DEFAULT_ENGINE.host, profiles=profiles)
        if isinstance(timer, pipeline_timer.PipelineTimer) and len(timer.stages) > 1:
            turns = best_mixed_pipeline(timer, RequestLengths(prompt, 0, answer, prompt), room, slo)
            budget = DEFAULT_ENGINE.token_budget if turns is None else turns.step_tokens
            return replace(DEFAULT_ENGINE, token_budget=budget)
        budget = paced_budget(timer, prompt, answer, max(1, min(room, DEFAULT_ENGINE.slots)), slo)
        return replace(DEFAULT_ENGINE, token_budget=budget, slots=min(DEFAULT_ENGINE.slots, budget))


def planned_chunk(template: Template, index: int, mean: tuple[float, float]) -> int:
    """Tokens in a step of a group's pipeline that does both phases, as the planner reckons; 0: it is none.

    It spreads prompts evenly over the batches that take turns. One that computes a whole prompt in a turn keeps the
    answers of all its batches waiting, and serves a third less within their objective.
    """
    stages = template.replicas[index].layout.stages
    lanes = sum(len(stage.nodes) for stage in stages)
    alone = {flow.bucket: flow.share for flow in template.flows if flow.prefill == flow.decode == index}
    if len(stages) < 2 or not alone:
        return 0
    per_s = max(each.closed_per_s * alone.get(each.bucket, 0.0) * each.tpot_s for each in template.capacity)
    return max(CHUNK_STEP, ceil(per_s * sum(mean) / lanes / CHUNK_STEP) * CHUNK_STEP)


def timer_of(
    model: Model,
    layout: Layout,
    nodes: Mapping[str, NodeType],
    host: EngineHost = DEFAULT_HOST,
    hops: tuple[Hop, ...] = (),
    profiles: Sequence[Profile] = (),
) -> StepTimer:
    """What was measured or the plain roofline for one node, the pipeline for more."""
    stage = layout.stages[0]
    if len(layout.stages) == 1 and len(stage.nodes) == 1:
        node, tp, ep = nodes[stage.nodes[0].node], stage.nodes[0].tp, stage.nodes[0].ep
        profile = profile_for(profiles, model, node, tp) if ep == "none" else None
        return roofline(model, node, tp, host=host, ep=ep) if profile is None else ProfileTimer(profile)
    return pipeline_timer.pipeline(model, layout, nodes, host=host, hops=hops)


def total_blocks(model: Model, layout: Layout, nodes: Mapping[str, NodeType], tokens: float) -> int:
    """Blocks of KV that fit, for requests of about so many tokens; the tightest stage decides.

    For plain attention the length does not matter. Fixed states and windows make short requests dearer per token.
    """
    least = float("inf")
    for stage, layers in pipeline_timer.stage_layers(model, layout):
        room = 0.0
        for stage_node in stage.nodes:
            memory = stage_memory(model, nodes[stage_node.node], stage_node.tp, layers, ep=stage_node.ep)
            require_fit(model, memory, nodes[stage_node.node], stage_node.tp)
            room += min(
                kv_tokens(model, memory, stage_node.tp, tokens, layers, stage_node.ep), float(1 << 40)
            )
        least = min(least, room)
    return max(1, floor(least / BLOCK_TOKENS))


def places(template: Template, nodes: Mapping[str, NodeType]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """For each replica the nodes of the copy that it stands on, packed in order; named machines stay one."""
    free = {each.node: [nodes[each.node].gpus] * each.count for each in template.nodes}
    named: dict[tuple[str, str], int] = {}
    result = []
    for replica in template.replicas:
        own: list[tuple[str, int]] = []
        for member in (stage_node for stage in replica.layout.stages for stage_node in stage.nodes):
            rooms = free.setdefault(member.node, [nodes[member.node].gpus])
            place = named.get((member.node, member.machine)) if member.machine else None
            if place is None:
                others = [(node, p) for (node, _), p in named.items()] if member.machine else own
                taken = {p for node, p in others if node == member.node}
                place = max(range(len(rooms)), key=lambda i: (rooms[i] >= member.tp, i not in taken, -i))
                if member.machine:
                    named[member.node, member.machine] = place
            rooms[place] -= member.tp
            if (member.node, place) not in own:
                own.append((member.node, place))
        result.append(tuple(own))
    return tuple(result)


def longest_in_use(plan: Plan, name: str, model: Model, mean_tokens: float) -> int:
    """The longest prompts that lines are fitted for: what the plan serves, but no more than eight times the mean.

    Beyond that few prompts are left, and a line that follows them misjudges all others.
    """
    asked = [each.longest_tokens for each in plan.buckets if each.model == name and each.rate_per_s > 0]
    longest = min(max(asked, default=model.max_context_tokens), model.max_context_tokens)
    return min(longest, max(512, round(8 * mean_tokens)))


def _names(layout: Layout, placed: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    names = dict.fromkeys(node.machine for stage in layout.stages for node in stage.nodes)
    return tuple(names) if all(names) and len(names) == len(placed) else ()


def kv_of(model: Model) -> KvWeight:
    windows = tuple(sorted(window_bytes_per_token(model).items()))
    growing, state, latent = kv_bytes_per_token(model), state_bytes(model), model.is_latent
    return KvWeight(model.layer_count, growing, windows, state, model.kv_bits, latent)


def _model_facts(resolved: ResolvedPlan, name: str, block_tokens: int) -> ModelFacts:
    kv, slo = kv_of(resolved.model(name)), resolved.slos.get(name)
    exact = bool(kv.windows) or kv.state_bytes > 0
    answer_tokens = resolved.mean_tokens.get(name, MEAN_TOKENS)[1]
    limits = None if slo is None or slo.e2e_s is None else slo.within_e2e(answer_tokens)
    size = (kv.growing_bytes, kv.state_bytes, exact, block_tokens)
    idle_s, (survive, share) = resolved.idle_s.get(name), resolved.survive.get(name, (None, 1.0))
    return ModelFacts(*size, slo, idle_s, kv.windows, kv.kv_bits, limits, survive, share, kv.latent)


def _replica_facts(
    timer: StepTimer,
    model: Model,
    blocks: int,
    mean: tuple[float, float],
    slo: Slo | None,
    slots: int,
    longest_prompt_tokens: int,
    rounds: bool = False,
    card_gbps: float = 0.0,
) -> ReplicaFacts:
    """A pipeline's times are those of all its batches together, not of one alone.

    Its next prompt begins long before one is done: a token of those ahead costs what the slowest stage takes. Unless
    it is one of a group (`rounds`), the rest of a mean prompt's way is time besides.
    """
    prompt, answer = max(1, round(mean[0])), max(1, round(mean[1]))
    line = PartialPrefillPredictor.in_use(timer, longest_prompt_tokens)
    per_token_s, fixed_s, curve, alone_s = line.k_p, line.b_p, (0.0, 0.0, 0.0), 0.0
    if not isinstance(timer, pipeline_timer.PipelineTimer) or not (rounds or sum(map(len, timer.stages)) > 1):
        curve = prompt_curve(timer, longest_prompt_tokens)
    else:
        paced = PartialPrefillPredictor.in_use(pipeline_timer.PipelineRounds(timer), longest_prompt_tokens)
        per_token_s, fixed_s, alone_s = paced.k_p, paced.b_p, max(line.k_p, 0.0)
        if not rounds:
            fixed_s = max(0.0, line.b_p + (line.k_p - paced.k_p) * prompt)
        timer = pipeline_timer.PipelineRounds(timer)
    room = max(1, min(slots, floor(blocks * BLOCK_TOKENS / (prompt + answer))))
    operating_point = best_operating(timer, prompt, answer, room, slo, "decode")
    batch = room if operating_point is None else operating_point.batch
    step_s = float(decode_step_s(timer, batch, prompt + answer / 2)[0])
    longest = min(model.max_context_tokens, blocks * BLOCK_TOKENS)
    first_s = float(decode_step_s(timer, 1, prompt + answer / 2)[0])
    per_token_s = max(per_token_s, 1e-12)
    knees = decode_knees(timer, batch, prompt + answer / 2)
    return ReplicaFacts(
        per_token_s, fixed_s, step_s, batch, blocks, longest, first_s, card_gbps, curve, alone_s, knees
    )


def _split_facts(
    template: Template, replica_models: Mapping[tuple[str, int], ReplicaModel], longest_tokens: int
) -> SplitFacts | None:
    """CRONUS's predictors for a pair: its first prefill replica, and the first one that is not."""
    if template.kind != "pair":
        return None
    roles = [replica.role for replica in template.replicas]
    low = next((i for i, role in enumerate(roles) if role == "prefill"), None)
    high = next((i for i, role in enumerate(roles) if role != "prefill"), None)
    if low is None or high is None:
        return None
    first = PartialPrefillPredictor.in_use(replica_models[template.name, low].timer, longest_tokens)
    budget = replica_models[template.name, high].engine.token_budget
    rest = ChunkedIterationPredictor.in_use(replica_models[template.name, high].timer, budget, longest_tokens)
    return SplitFacts(first.k_p, first.b_p, rest.k_ctxp, rest.k_ctxd, rest.b_c, budget)
