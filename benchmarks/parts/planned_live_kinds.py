"""The kinds of plans in `planned_live.py`: a spec, how it is planned, which requests come, and what happens then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from parts.adapt_rig import News, Rig
from parts.adapt_scenarios import MARKET_NODES, NEVER_S, REMOTE, REMOTE_LOAD, post, spec_text, write_market
from parts.common import ROOT
from potluck.core.values.types import LengthBin, Traffic
from potluck.sim.load.workload import Workload, merge, of_traffic
from potluck.sim.world.faults import Fault, Faults, PriceChange, SupplyChange
from potluck.spec.spec_values import Spec

SMOOTH = 0.1
"""Variation of the gaps between requests: nothing but the plan, the routing and the hardware decides."""
SLOW = 4.0
"""Times as long as planned, for the engine that gets slow."""
CHEAP_USD_PER_H = 0.2
PAIR = """\
    - {name: east, nodes: [{node: 1xA100-80, available: 1}, {node: 1xA10, available: 1}]}
"""
COMBO = """\
    - {name: east, nodes: [{node: 1xL40S, available: 3}]}
"""
PRICE = f"    - {{name: east, nodes: [{MARKET_NODES}]}}\n"
POOL = (ROOT / "examples" / "pool.yaml").read_text("utf-8") + (
    "policy:\n  classes: [{name: standard, late: true, max_wait_s: 120}]\n"
)
"""Late answers are wanted: nothing is refused, and what goes wrong shows in attainment."""
CODING = (1900, 16)
"""Mean tokens of prompts and answers once conversations have become coding."""
CHAT = (150, 300)
"""The same where prompts are short: prefill has little to do, and decode much."""


@dataclass(frozen=True)
class Part:
    """So long requests come at a share of the planned rate, perhaps of other mean lengths."""

    lasts_s: float
    share: float = 1.0
    lengths: tuple[int, int] | None = None


@dataclass(frozen=True)
class Kind:
    name: str
    strategy: str
    text: str
    before: Part
    after: Part
    quick: tuple[float, float]
    """How long each lasts in a quick run."""
    rules: Mapping[str, object] = field(default_factory=dict)
    cause: Callable[[Rig, Path], None] = lambda rig, folder: None
    """Unless given other requests come, that is all."""
    wrong: Callable[[float], Faults | None] = lambda at_s: None
    """The same cause for the simulator."""
    waits_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What must follow, and parts of what is then said; the last of several where its name says so."""
    plan_s: float = 10.0

    def parts(self, quick: bool) -> tuple[Part, Part]:
        if not quick:
            return self.before, self.after
        first_s, then_s = self.quick
        return replace(self.before, lasts_s=first_s), replace(self.after, lasts_s=then_s)

    def times_s(self, news: Iterable[News], cause_s: float) -> dict[str, float]:
        """How long after its cause what happened."""
        later = [item for item in news if item[0] >= cause_s]
        times: dict[str, float] = {}
        for name, words in self.waits_for.items():
            fits = [at_s for at_s, what, _ in later if all(word in what for word in words)]
            times[name] = NEVER_S if not fits else fits[-1 if name.startswith("last") else 0] - cause_s
        return times


def load_of(spec: Spec, parts: Sequence[Part], fraction: float, seed: int) -> Workload:
    made, begins_s = [], 0.0
    for part in parts:
        traffic = [_traffic(model.traffic, part, fraction) for model in spec.models]
        count = max(2, round(sum(item.rate_per_s for item in traffic) * part.lasts_s))
        load = of_traffic(traffic, count, seed, SMOOTH)
        arrival_s = load.arrival_s * (part.lasts_s / max(part.lasts_s, load.span_s))
        made.append(replace(load, arrival_s=begins_s + arrival_s))
        begins_s += part.lasts_s
    return merge(made)


def _traffic(planned: Traffic, part: Part, fraction: float) -> Traffic:
    rate = planned.rate_per_s * part.share * fraction
    if part.lengths is None:
        return replace(planned, rate_per_s=rate)
    return replace(planned, rate_per_s=rate, lengths=(LengthBin(*map(float, part.lengths), 1.0),))


def _slow_prefill(rig: Rig, folder: Path) -> None:
    victim = next(replica for replica in rig.looks[-1].replicas if replica["region"] == "far")
    post(f"{victim['url']}/pace", {"pace": SLOW})


def _slow_far(at_s: float) -> Faults:
    return Faults((Fault(at_s, "slow", replica="*@far*", factor=SLOW),))


def _cheaper(rig: Rig, folder: Path) -> None:
    write_market(folder, {"1xA10": (6, CHEAP_USD_PER_H)})


def _cheaper_there(at_s: float) -> Faults:
    return Faults(
        prices=(PriceChange(at_s, "east", "1xA10", CHEAP_USD_PER_H),),
        availability=(SupplyChange(at_s, "east", "1xA10", 6),),
    )


KINDS = {
    item.name: item
    for item in (
        Kind(
            "pool",
            "thunderserve",
            POOL,
            Part(60.0, 0.8),
            Part(60.0, 0.8, CODING),
            (20.0, 20.0),
            {"scaling": "flips", "window_s": 15},
            waits_for={"first flip": (" becomes ",)},
            plan_s=60.0,
        ),
        Kind(
            "pair",
            "cronus",
            spec_text(PAIR, ttft=3000, tpot=150, rate=7.5, cv=0.5, output=120, cv_out=0.5),
            Part(60.0),
            Part(15.0, 0.5),
            (15.0, 5.0),
        ),
        Kind(
            "combo",
            "cauchy",
            spec_text(COMBO, ttft=3000, tpot=45, rate=4, cv=0.5, output=120, cv_out=0.5),
            Part(60.0),
            Part(60.0, 1.0, CHAT),
            (20.0, 20.0),
        ),
        Kind(
            "remote",
            "prfaas",
            spec_text(REMOTE, **REMOTE_LOAD),
            Part(60.0, 0.8),
            Part(45.0, 0.8),
            (25.0, 15.0),
            {"scaling": "prfaas", "window_s": 15},
            _slow_prefill,
            _slow_far,
            {"threshold moved": (" may go over ",)},
        ),
        Kind(
            "price",
            "coral",
            spec_text(PRICE, rate=6, cv=0.3, cv_out=0.5),
            Part(40.0, 0.8),
            Part(60.0, 0.8),
            (20.0, 25.0),
            {"scaling": "replan", "window_s": 20, "replan_s": 3600, "grace_s": 15},
            _cheaper,
            _cheaper_there,
            {
                "plan asked for": ("another plan is asked for",),
                "plan adopted": ("plan of", "adopted"),
                "first new copy ready": ("1xA10 tp1@east", " is ready"),
                "last old copy gone": ("1xL4 tp1@east", " stops"),
            },
        ),
    )
}
