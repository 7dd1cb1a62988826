"""Is what is planned what is served? A plan of each kind on mock engines, beside the simulator.

    python benchmarks/planned_live.py [--quick] [--json] [--only KIND]...

    pool      groups of machines with flows between them; conversations become coding, and roles flip (THUNDERSERVE)
    pair      a prompt shared by a slow and a fast GPU (CRONUS)
    combo     prefill apart from decode; with little to do whole requests run where prompts are computed (CAUCHY)
    remote    prefill in another region; its engine gets slow, and the threshold moves (PrfaaS)
    price     another GPU gets cheaper, and the plan follows (CORAL)

Each starts its own `potluck up` (real processes) and sends the simulator's requests at the simulator's times. Shares
are of all requests before anything happens: of those that a replica has a part in, and of those from one to another.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from parts.adapt_rig import NEVER_S, News, Rig, Sent, service, shots_of_load, told_by
from parts.adapt_scenarios import MARKET_NODES, REMOTE, REMOTE_LOAD, post, report, spec_text, write_market
from parts.common import ROOT, options, run
from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.simulating.simulation import SimulationInputs, planner_of, policy_of, scene_of
from potluck.core.routing.template_weights import model_weights
from potluck.core.values.plan import plan_to_json
from potluck.core.values.types import LengthBin, Traffic
from potluck.loadgen.load_client import kept
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.runtime.replica_models import ReplicaModels
from potluck.sim.load.workload import Workload, merge, of_traffic
from potluck.sim.results.metrics import judge, tpot
from potluck.sim.results.plan_comparison import lengths_of, promises
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate
from potluck.sim.world.faults import Fault, Faults, PriceChange, SupplyChange
from potluck.spec.spec_values import Spec

SMOOTH = 0.1
"""Variation of the gaps between requests: nothing but the plan, the routing and the hardware decides."""
SLOW = 4.0  # Times as long as planned, for the engine that gets slow.
CHEAP_USD_PER_H = 0.2
PAIR = "    - {name: east, nodes: [{node: 1xA100-80, available: 1}, {node: 1xA10, available: 1}]}\n"
COMBO = "    - {name: east, nodes: [{node: 1xL40S, available: 3}]}\n"
PRICE = f"    - {{name: east, nodes: [{MARKET_NODES}]}}\n"
LATE = "policy:\n  classes: [{name: standard, late: true, max_wait_s: 120}]\n"
POOL = (ROOT / "examples" / "pool.yaml").read_text("utf-8") + LATE
"""Late answers are wanted: nothing is refused, and what goes wrong shows in attainment."""
CODING = (1900, 16)  # Mean tokens of prompts and answers once conversations have become coding.
CHAT = (150, 300)  # The same where prompts are short: prefill has little to do, and decode much.


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
    quick: tuple[float, float]  # How long each lasts in a quick run.
    rules: Mapping[str, object] = field(default_factory=dict)
    cause: Callable[[Rig, Path], object] = lambda rig, folder: None
    """Unless given other requests come, that is all."""
    wrong: Callable[[float], Faults | None] = lambda at_s: None  # The same cause for the simulator.
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
        workload = of_traffic(traffic, count, seed, SMOOTH)
        arrival_s = workload.arrival_s * (part.lasts_s / max(part.lasts_s, workload.span_s))
        made.append(replace(workload, arrival_s=begins_s + arrival_s))
        begins_s += part.lasts_s
    return merge(made)


def _traffic(planned: Traffic, part: Part, fraction: float) -> Traffic:
    lengths = (LengthBin(*map(float, part.lengths), 1.0),) if part.lengths else planned.lengths
    return replace(planned, rate_per_s=planned.rate_per_s * part.share * fraction, lengths=lengths)


def _slow_prefill(rig: Rig, folder: Path) -> None:
    victim = next(replica for replica in rig.looks[-1].replicas if replica["region"] == "far")
    post(f"{victim['url']}/pace", {"pace": SLOW})


def _cheaper_there(at_s: float) -> Faults:
    prices = (PriceChange(at_s, "east", "1xA10", CHEAP_USD_PER_H),)
    return Faults(prices=prices, availability=(SupplyChange(at_s, "east", "1xA10", 6),))


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
            lambda at_s: Faults((Fault(at_s, "slow", replica="*@far*", factor=SLOW),)),
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
            lambda rig, folder: write_market(folder, {"1xA10": (6, CHEAP_USD_PER_H)}),
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


SEED = 11
SETTLED = 1 / 3  # From this share of the first part on requests are counted: before, little has been learned.
SHARE = 0.1
"""Shares may differ by so much, live from simulated, and both from planned where a plan tells them."""
TOLD = ("pool", "remote")
"""Kinds whose plans say what each replica gets; in pairs and combos the Brain decides request by request."""


@dataclass
class Seen:
    replicas: Counter[str] = field(default_factory=Counter)
    flows: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    attainment: dict[str, float] = field(default_factory=dict)  # Before and after.
    latency_s: dict[str, float] = field(default_factory=dict)  # Before what happens.
    lost: int = 0
    times_s: dict[str, float] = field(default_factory=dict)

    def share(self, what: str, name: str) -> float:
        counts: Counter[str] = getattr(self, what)
        whole = sum(self.kinds.values())
        return counts[name] / whole if whole else 0.0


def counted(sent: Iterable[Sent], from_s: float, to_s: float, roles: Mapping[str, str]) -> Seen:
    seen = Seen()
    for at_s, kind, replicas in sent:
        if not from_s <= at_s < to_s:
            continue
        seen.kinds[f"{kind}, {roles.get(replicas[0], '?')}" if kind == "in_place" else kind] += 1
        places = [place_of(replica) for replica in replicas]
        seen.replicas.update(set(places))
        if replicas[0] != replicas[-1]:
            seen.flows[f"{places[0]} => {places[-1]}"] += 1
    return seen


def place_of(replica: str) -> str:
    """A replica's place in its template, as flows of a plan name it. Copies are one: which of them gets a request is
    nobody's promise."""
    unit, _, index = replica.rpartition("/")
    return f"{unit.rpartition('#')[0]}/{index}"


def simulated(
    kind: Kind, inputs: SimulationInputs, workload: Workload, cause_s: float
) -> tuple[SimResult, list[Sent], list[News]]:
    policy = policy_of(tuple(f"{name}={value}" for name, value in kind.rules.items()), inputs.spec.policy)
    log = io.StringIO()
    planner = planner_of(inputs, policy, 5.0)
    result = simulate(
        scene_of(inputs), workload, policy, faults=kind.wrong(cause_s), planner=planner, log=log
    )
    log.seek(0)
    return result, *told_by(log)


def planned(inputs: SimulationInputs, result: SimResult) -> Seen:
    """What the plan says, in requests of a thousand."""
    resolved, plan = scene_of(inputs), inputs.plan
    replica_models = ReplicaModels(resolved)
    replica_models.learn(plan)
    policy = inputs.spec.policy
    lengths = lengths_of(result.records, model_weights(plan, policy.balance))
    text = promises(plan, replica_models, lengths, policy.balance)
    total = sum(model.served_per_s for model in text.models)
    seen = Seen()
    seen.kinds["all"] = 1000
    counts = {(deployment.template, deployment.region): deployment.count for deployment in plan.deployments}
    for replica in text.replicas:
        name, region, index = replica.place
        rate = replica.counted_per_s * counts[name, region]
        seen.replicas[f"{name}@{region}/{index}"] = round(1000 * rate / total)
    for flow in text.flows:
        seen.flows[f"{flow.source} => {flow.target}"] = round(1000 * flow.rate_per_s / total)
    seen.attainment = {"before": min(model.attainment or 0.0 for model in text.models)}
    return seen


def attained(result: SimResult, from_s: float, to_s: float) -> float:
    verdict = judge(result.records, result.slos, result.end_s, result.classes)
    arrivals = result.records.arrival_s
    rows = (arrivals >= from_s) & (arrivals < to_s) & verdict.judged
    return float((rows & verdict.met).sum() / max(1, rows.sum()))


def latencies(ttft_s: Sequence[float], tpot_s: Sequence[float]) -> dict[str, float]:
    return {
        "TTFT, mean": float(np.mean(ttft_s)),
        "TTFT, nine of ten": float(np.percentile(ttft_s, 90)),
        "TPOT, mean": float(np.mean(tpot_s)),
    }


def served(kind: Kind, folder: Path, quick: bool) -> dict[str, float]:
    spec_path = folder / "potluck.yaml"
    spec_path.write_text(kind.text, "utf-8")
    spec = read_spec(spec_path)
    problem = load_problem(spec, 0.8, None, (), 0.0)
    plan = STRATEGIES[kind.strategy](TemplateFactory(problem), SolveSettings(time_limit_s=kind.plan_s)).plan
    plan_path = folder / "plan.json"
    plan_path.write_text(plan_to_json(plan), "utf-8")
    inputs = SimulationInputs(spec, problem, plan)
    parts = kind.parts(quick)
    workload, cause_s = load_of(spec, parts, plan.fraction, SEED), parts[0].lasts_s
    begin_s = SETTLED * cause_s
    result, sim_sent, sim_news = simulated(kind, inputs, workload, cause_s)
    roles = {replica.id: replica.role for replica in result.replicas}
    sim = counted(sim_sent, begin_s, cause_s, roles)
    end_s = float(workload.arrival_s[-1]) + 1.0
    sim.attainment = {"before": attained(result, begin_s, cause_s), "after": attained(result, cause_s, end_s)}
    rows = (result.records.arrival_s >= begin_s) & (result.records.arrival_s < cause_s)
    ttft_s = result.records.first_token_s - result.records.arrival_s
    sim.latency_s = latencies(ttft_s[rows], tpot(result.records)[rows])
    sim.times_s = kind.times_s(sim_news, cause_s)
    shots = shots_of_load(workload)
    market = folder / "market.yaml"
    with service(folder, [plan_path, spec_path], kind.rules, ["--market", str(market)]) as rig:
        with rig.fired(shots):
            rig.sleep_until(cause_s)
            kind.cause(rig, folder)
        report(rig)
        live = counted(rig.sent, begin_s, cause_s, roles)
        slos = {model.name: model.slo for model in spec.models}
        for name, low, high in (("before", begin_s, cause_s), ("after", cause_s, end_s)):
            mine = [shot for shot in rig.shots if low <= shot.at_s < high]
            met = sum(kept(shot, slos[shot.model]) for shot in mine)
            live.attainment[name] = met / len(mine) if mine else 1.0
            if name == "before":
                whole = [shot for shot in mine if shot.ended]
                live.latency_s = latencies([s.ttft_s for s in whole], [s.tpot_s for s in whole])
        live.lost = rig.lost
        live.times_s = kind.times_s(rig.news, cause_s)
    return figures(planned(inputs, result), sim, live)


def figures(plan: Seen, sim: Seen, live: Seen) -> dict[str, float]:
    off = [
        abs(live.share(what, name) - sim.share(what, name))
        for what in ("replicas", "flows", "kinds")
        for name in {*getattr(sim, what), *getattr(live, what)}
    ]
    pairs = [(name, item) for name in plan.replicas for item in (sim, live)]
    off_plan = [abs(item.share("replicas", name) - plan.share("replicas", name)) for name, item in pairs]
    return {
        "requests": float(sum(live.kinds.values())),
        "lost": float(live.lost),
        "shares, off planned, at most": max(off_plan, default=0.0),
        "attainment planned": plan.attainment["before"],
        **{f"attainment simulated, {name}": value for name, value in sim.attainment.items()},
        **{f"attainment live, {name}": value for name, value in live.attainment.items()},
        **{f"{name} simulated (s)": value for name, value in sim.latency_s.items()},
        **{f"{name} live (s)": value for name, value in live.latency_s.items()},
        "shares, live off simulated, at most": max(off, default=1.0),
        "kinds of routes": float(len(live.kinds)),
        **{f"{name} after (s), simulated": value for name, value in sim.times_s.items()},
        **{f"{name} after (s), live": value for name, value in live.times_s.items()},
    }


def measure(names: Sequence[str], quick: bool) -> dict[str, float]:
    result: dict[str, float] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="planned-live-") as folder:
            mine = served(KINDS[name], Path(folder), quick)
        result |= {f"{name}: {key}": value for key, value in mine.items()}
    return result


if __name__ == "__main__":
    names = options(only=tuple(KINDS)).only
    if "--quick" in sys.argv and names == tuple(KINDS):
        names = ("pair",)
    targets: dict[str, tuple[str, float]] = {}
    for name in names:
        targets |= {
            f"{name}: lost": ("<=", 0.0),
            f"{name}: shares, live off simulated, at most": ("<=", SHARE),
            f"{name}: attainment live, before": (">=", 0.9),
            **({f"{name}: shares, off planned, at most": ("<=", SHARE)} if name in TOLD else {}),
            **{f"{name}: {what} after (s), live": ("<", NEVER_S) for what in KINDS[name].waits_for},
        }
    without = "all but one kind, or with --only a shorter run"
    run("planned_live", lambda quick: measure(names, quick), targets, seeds=(SEED,), quick_without=without)
