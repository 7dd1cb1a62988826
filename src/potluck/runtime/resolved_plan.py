"""A plan with all that its names mean: models, nodes, regions, links, objectives, engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from potluck.core.errors import UnknownNameError
from potluck.core.values.model import Model, in_format
from potluck.core.values.plan import Plan
from potluck.core.values.service import FailureDomain
from potluck.core.values.types import Link, NodeType, Region, Slo
from potluck.perf.kv_capacity import STEP_TOKENS
from potluck.perf.phases import CHUNK_TOKENS
from potluck.perf.startup import DEFAULT_COSTS, StartupCosts
from potluck.perf.throughput import MAX_BATCH
from potluck.perf.timers.engine_host import DEFAULT_HOST, EngineHost
from potluck.perf.timers.profile import Profile


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """How an engine is set up: what a step may hold, and what its host takes of each."""

    token_budget: int = CHUNK_TOKENS
    """New tokens of a step; a pipeline has as many in each of its lanes."""
    slots: int = MAX_BATCH
    host: EngineHost = DEFAULT_HOST
    """Seconds of a step in which no GPU works."""
    pipelined: bool = True
    """Whether the stages of a pipeline work on different batches at once; else on one after another."""


DEFAULT_ENGINE = EngineSetup()
PROMPT_ENGINE = EngineSetup(STEP_TOKENS)
"""That of a replica that does prompts alone: no answers wait for its steps."""


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    plan: Plan
    models: Mapping[str, Model]
    """By the name that requests use; the plan says in which format their weights are."""
    nodes: Mapping[str, NodeType]
    regions: tuple[Region, ...]
    links: tuple[Link, ...] = ()
    slos: Mapping[str, Slo] = field(default_factory=dict)
    mean_tokens: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Mean prompt and answer of a model, for the facts that depend on them."""
    machine_gbps: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """(gbps, round trip in s) between two named machines, where a pool says so; else their cards count."""
    machine_zones: Mapping[str, str] = field(default_factory=dict)
    """Named machines, and the zone or rack of each that has one."""
    startup: StartupCosts = DEFAULT_COSTS
    startups: Mapping[str, StartupCosts] = field(default_factory=dict)
    """Of models whose weights lie where that differs."""
    idle_s: Mapping[str, float] = field(default_factory=dict)
    """Models whose copies go after so long without a request."""
    survive: Mapping[str, tuple[FailureDomain, float]] = field(default_factory=dict)
    """Models of which any one node, zone or region may be lost while that share is still served."""
    engines: Mapping[tuple[str, int], EngineSetup] = field(default_factory=dict)
    """(template, index of the replica in it) to its engine, where it is not the default one."""
    paced: bool = True
    """Whether other engines that compute prompts beside answers take steps that fit the objective
    (`perf.serving.budget`): the planner reckons with prompts that are spread evenly over steps.
    """
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Rates before the run, for forecasts (`core.brain.facts`)."""
    profiles: Mapping[str, tuple[Profile, ...]] = field(default_factory=dict)
    """Measured step times of a model, which a plan was made with; they go before the roofline."""

    rtt_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(origin, region) to how long it takes from users there to the region and back."""
    unknown_models: frozenset[str] = frozenset()
    """Models of servers that others run, whose architecture is unknown: `models` has placeholders for them."""

    def model(self, name: str) -> Model:
        if name not in self.models:
            raise UnknownNameError("plan: model", name, self.models)
        weights = self.plan.format_of(name)
        return self.models[name] if weights is None else in_format(self.models[name], weights)

    def node(self, name: str) -> NodeType:
        if name not in self.nodes:
            raise UnknownNameError("plan: node", name, self.nodes)
        return self.nodes[name]

    def price_usd_per_h(self, region: str, node: str) -> float:
        """What a node costs there; 0 where nothing is said."""
        result = next((item for item in self.regions if item.name == region), None)
        offer = None if result is None else result.offer(node)
        return 0.0 if offer is None else offer.price_usd_per_h
