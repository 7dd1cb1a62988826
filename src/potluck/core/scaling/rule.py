"""The interface of scaling rules: what they observe at each tick, and the decisions they may return.

Rules change nothing themselves: `Resize` changes the wanted counts, which `reconcile.py` works towards; `SetLengths`
is what groups share their requests by. `why` explains a rule's last decision, or why it decided nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from potluck.core.scaling.traffic_window import ObservedTraffic
from potluck.core.state.fleet import FleetState, TemplateCopy
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import Region, Role

MARKET_CHANGED_REASON = "prices or nodes changed"
MIN_FINISHED_FOR_LENGTHS = 30  # Finished answers that observed lengths need to be used in a plan.
Nodes = dict[tuple[str, str], int]


class Resize(NamedTuple):
    template: str
    region: str
    copies: int
    reason: str


class FlipRole(NamedTuple):
    replica: str
    role: Role
    reason: str


class AskReplan(NamedTuple):
    """Ask the planner for a plan at these rates, every model named."""

    rates_per_s: tuple[tuple[str, float], ...]
    reason: str


class SetThreshold(NamedTuple):
    """Prompts of a model with more uncached tokens than this may be prefilled in another region."""

    model: str
    tokens: int
    reason: str


class SetLengths(NamedTuple):
    """The observed mean lengths of a model's requests: groups share requests accordingly."""

    model: str
    prompt_tokens: float
    output_tokens: float


ScaleDecision = Resize | FlipRole | AskReplan | SetThreshold | SetLengths
Decisions = tuple[ScaleDecision, ...]


class RuleNotes:
    """A rule's explanation: a line per model or topic, with what it waits for."""

    __slots__ = ("_lines", "_waits")

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}
        self._waits: dict[str, str] = {}

    def say(self, topic: str, line: str) -> None:
        self._lines[topic] = line
        self._waits.pop(topic, None)

    def wait(self, topic: str, line: str) -> None:
        self._waits[topic] = line

    @property
    def any(self) -> str:
        return self.text() if self._lines or self._waits else ""

    def text(self) -> str:
        topics = dict.fromkeys([*self._lines, *self._waits])
        return "; ".join(f"{topic}: {self._line(topic)}" for topic in topics) or "not asked yet"

    def _line(self, topic: str) -> str:
        text, waits = self._lines.get(topic), self._waits.get(topic)
        return f"{text} ({waits})" if text and waits else text or waits or ""


class Scaler:
    def __init__(self) -> None:
        self._notes = RuleNotes()

    def on_tick(self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan) -> Decisions:
        return ()

    def market_changed(self, regions: tuple[Region, ...]) -> None:
        """Prices or available nodes changed."""

    def why(self) -> str:
        """The last decision and its reason, model by model; never empty after a tick."""
        return self._notes.text()


class NoScaling(Scaler):
    def why(self) -> str:
        return "scaling is off"


def available_nodes(regions: tuple[Region, ...]) -> Nodes | None:
    """How many nodes of each type each region rents at most; None when that is not known."""
    if not regions:
        return None
    return {
        (region.name, node_offer.node): node_offer.available
        for region in regions
        for node_offer in region.offers
    }


def used_nodes(units: Mapping[str, TemplateCopy], templates: Mapping[str, Template]) -> Nodes:
    """The nodes that copies hold, including draining ones; copies of unknown templates count none."""
    used: Counter[tuple[str, str]] = Counter()
    for template_copy in units.values():
        for node_count in (
            templates[template_copy.template].nodes if template_copy.template in templates else ()
        ):
            used[template_copy.region, node_count.node] += node_count.count
    return used


def unit_price_usd_per_h(template: Template, region: str, regions: tuple[Region, ...]) -> float | None:
    """Rent of one copy; None where the region does not offer one of its nodes."""
    region_offer = next((candidate for candidate in regions if candidate.name == region), None)
    price = 0.0
    for node_count in template.nodes:
        offer = region_offer.offer(node_count.node) if region_offer else None
        if offer is None:
            return None
        price += node_count.count * offer.price_usd_per_h
    return price


def queued_requests(fleet: FleetState, model: str) -> int:
    """Requests that replicas report as not begun: work that arrival rates do not show."""
    statuses = [replica.status for replica in fleet.views.values() if replica.member.model == model]
    return sum(status.queued for status in statuses if status is not None)


def missing_copies(fleet: FleetState, plan: Plan) -> int:
    """Copies that the plan has and the fleet has not, not even starting."""
    staying = [
        template_copy
        for template_copy in fleet.units.values()
        if not any(replica.state == "draining" for replica in template_copy.views)
    ]
    counts = Counter((template_copy.template, template_copy.region) for template_copy in staying)
    return sum(
        max(0, deployment.count - counts[deployment.template, deployment.region])
        for deployment in plan.deployments
    )
