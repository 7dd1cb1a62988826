"""What happens to the service in `adapt.py`: one function for each, from a folder to figures.

Every one has a time before, one in which something happens, and one after; attainment is told for each. `lost` counts
requests that were not answered whole, and must be nothing everywhere. Nothing is refused, so that everything that
goes wrong shows in attainment. Windows and waits are short, so that a run takes a minute.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from parts.adapt_rig import MODEL, NEVER_S, OUTPUT, PROMPT, Phase, Rig, Seen, service, shots_of
from parts.common import Background, say
from potluck.control.manual_changes import BY_HAND, scaled
from potluck.control.state_store import StateStore
from potluck.core.scaling.forecast import BIN_S, DAY_BINS
from potluck.core.values.plan import Plan, plan_to_json
from potluck.core.values.types import Slo

SLO = Slo(4.0, 0.25)
SPEC = """kv_codecs: [raw, int8, int4]
models:
  - model: Llama-3.1-8B
    name: {model}
    slo: {{ttft_ms: {ttft}, tpot_ms: {tpot}}}
    traffic: {{rate_per_s: {rate}, input: {{mean: {prompt}, cv: {cv}}}, output: {{mean: {output}, cv: {cv_out}}}}}
{more}policy:
  classes: [{{name: standard, late: true, max_wait_s: 120}}]
fleet:
  regions:
"""
REMOTE = """\
    - {name: near, nodes: [{node: 1xA10, available: 8}]}
    - {name: far, nodes: [{node: 1xL40S, available: 1}]}
links:
  - {from: far, to: near, gbps: 40, rtt_ms: 10}
  - {from: near, to: far, gbps: 0.05, rtt_ms: 10}
"""
REMOTE_LOAD = {"tpot": 60, "rate": 10, "prompt": 1500, "cv": 1.0, "output": 60, "cv_out": 0.5}

MARKET_NODES = (
    "{node: 1xL4, available: 6, price_usd_per_h: 0.6}, {node: 1xA10, available: 0, price_usd_per_h: 0.9}"
)
FEW_L4 = "{node: 1xL4, available: 4, price_usd_per_h: 0.6}, {node: 1xA10, available: 4, price_usd_per_h: 1.6}"

Figures = dict[str, float]


def spec_text(regions: str, **changes: object) -> str:
    usual = {"model": MODEL, "ttft": 4000, "tpot": 250, "prompt": PROMPT, "output": OUTPUT, "more": ""}
    return SPEC.format(**{**usual, "cv": 0.15, "cv_out": 0.15, **changes}) + regions


def write_spec(
    folder: Path, rate: float, nodes: str = "{node: 1xL4, available: 10}", **changes: object
) -> Path:
    path = folder / "potluck.yaml"
    path.write_text(spec_text(f"    - {{name: east, nodes: [{nodes}]}}\n", rate=rate, **changes), "utf-8")
    return path


def plan_as(strategy: str, spec: Path) -> Plan:
    """A plan of one strategy, where `auto` would not show what is to be shown."""
    from potluck.cli.common.inputs import load_problem, read_spec
    from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory

    problem = load_problem(read_spec(spec), 0.8, None, (), 0.0)
    return STRATEGIES[strategy](TemplateFactory(problem), SolveSettings(time_limit_s=20.0)).plan


@contextmanager
def serving(
    spec: Path, rules: Mapping[str, object] = MappingProxyType({}), *flags: str, plan: Plan | None = None
) -> Iterator[Rig]:
    """A service with a plan (`melange` unless given), and a market beside its spec."""
    path = spec.with_name("plan.json")
    path.write_text(plan_to_json(plan or plan_as("melange", spec)), "utf-8")
    market = spec.with_name("market.yaml")
    with service(spec.parent, [path, spec], rules, ["--market", str(market), *flags]) as rig:
        yield rig
        report(rig)


def write_market(folder: Path, offers: Mapping[str, tuple[int, float]], notices: str = "") -> Path:
    """As a feed would: the whole file at once. Node to (how many, for how much)."""
    lines = [
        f"  - {{region: east, node: {node}, available: {count}, price_usd_per_h: {price}}}"
        for node, (count, price) in offers.items()
    ]
    text = "\n".join(["offers:", *lines, *(["notices:", notices] if notices else [])])
    draft = folder / "market.draft"
    draft.write_text(text, "utf-8")
    return draft.replace(folder / "market.yaml")


def told(rig: Rig, happens_s: float, settled_s: float, slo: Slo = SLO) -> Figures:
    end_s = max((shot.at_s for shot in rig.shots), default=0.0) + 1.0
    return {
        "requests": len(rig.shots),
        "lost": rig.lost,
        "before": rig.attainment(slo, 0.0, happens_s),
        "during": rig.attainment(slo, happens_s, settled_s),
        "after": rig.attainment(slo, settled_s, end_s),
    }


def slow(folder: Path, seed: int, happens_s: float = 20.0, lasts_s: float = 50.0) -> Figures:
    """One replica takes three times as long as planned: it is noticed, and gets less to do."""
    spec = write_spec(folder, 6.0, "{node: 1xL4, available: 8}")
    with serving(spec) as rig:
        with rig.fired(shots_of([Phase(lasts_s, 4.5)], seed)):
            rig.sleep_until(happens_s)
            victim = next(replica for replica in rig.looks[-1].replicas if replica["state"] == "ready")
            post(f"{victim['url']}/pace", {"pace": 3})
            happens_s = rig.now_s
            say(f"{victim['replica']} is slow from {happens_s:.1f} s on")
        name = victim["replica"]

        def pace(look: Seen) -> float:
            return next((replica["pace"] for replica in look.replicas if replica["replica"] == name), 1.0)

        figures = told(rig, happens_s, happens_s + 10.0)
        figures["noticed_s"] = rig.note_s("brain", happens_s, "times as long as planned")
        figures["pace_seen"] = max((pace(item) for item in rig.looks if item.at_s > happens_s), default=1.0)
        return figures


def killed(folder: Path, seed: int) -> Figures:
    """A node dies and none like it is left: what is left is routed anew, then a full plan takes another GPU."""
    spec = write_spec(folder, 6.0, FEW_L4)
    happens_s, lasts_s = 25.0, 65.0
    rules = {"scaling": "replan", "window_s": 20, "replan_s": 3600, "grace_s": 15}
    with serving(spec, rules) as rig:
        with rig.fired(shots_of([Phase(lasts_s, 4.5)], seed)):
            rig.sleep_until(happens_s)
            pid, name = rig.engines()[0]
            before = rig.looks[-1].ready()
            write_market(folder, {"1xL4": (before - 1, 0.6)})
            os.killpg(pid.number, signal.SIGKILL)
            happens_s = rig.now_s
            say(f"{name} is killed at {happens_s:.1f} s, {before} were ready")
            rig.wait_for(lambda look: look.ready() < before, 20.0)
            back_s = rig.wait_for(lambda look: look.ready() >= before, 40.0)
        settled_s = back_s or lasts_s
        return {
            **told(rig, happens_s, settled_s),
            "noticed_s": rig.note_s("brain", happens_s, "is lost"),
            "first_answer_s": rig.note_s("plan", happens_s, "what is left"),
            "full_plan_s": rig.note_s("plan", happens_s, "instead of"),
            "replaced_s": settled_s - happens_s,
        }


def surge(folder: Path, seed: int) -> Figures:
    """Three times the load, then a third of it: copies come, and go after their grace. Windows of 15 s."""
    base, up_s, down_s, end_s = 2.4, 25.0, 85.0, 140.0
    rules = {"scaling": "cauchy", "window_s": 15, "grace_s": 10}
    with serving(write_spec(folder, 3.0), rules) as rig:
        rig.load([Phase(up_s, base), Phase(down_s - up_s, 3 * base), Phase(end_s - down_s, base)], seed)
        most = max(look.ready() for look in rig.looks)
        first, at_last = rig.looks[0].ready(), rig.looks[-1].ready()
        out_s = next((seen.at_s for seen in rig.looks if seen.at_s > up_s and seen.ready() > first), NEVER_S)
        in_s = next((look.at_s for look in rig.looks if look.at_s > down_s and look.ready() < most), NEVER_S)
        settled_s = up_s + rig.recovered_s(SLO, up_s)
        return {
            **told(rig, up_s, min(settled_s, down_s)),
            "copies_before": first,
            "copies_most": most,
            "copies_after": at_last,
            "out_s": out_s - up_s,
            "recovered_s": settled_s - up_s,
            "in_s": in_s - down_s,
        }


def shift(folder: Path, seed: int) -> Figures:
    """From conversation to coding: prompts five times as long, answers a tenth. Roles flip. Windows of 15 s."""
    talk, code = (300, 120), (1500, 12)
    spec = write_spec(folder, 8.0, "{node: 1xL4, available: 6}", prompt=talk[0], output=talk[1])
    plan = plan_as("prfaas", spec)
    for template in plan.templates:
        count = 2 if template.replicas[0].role == "prefill" else 4
        plan = scaled(plan, template.name, "east", count, {"east": 0.6})
    happens_s, lasts_s = 35.0, 100.0
    slo = Slo(2.0, SLO.tpot_s)
    rules = {"scaling": "flips", "window_s": 15}
    with serving(spec, rules, plan=plan) as rig:
        # Five that prefill for one that decodes are bound by its card (6.4 a second), four for two by prefill (7.8).
        rig.load([Phase(happens_s, 7.0, *talk), Phase(lasts_s - happens_s, 7.0, *code)], seed)
        flips = [at_s for at_s, what, _ in rig.news if " becomes " in what]
        roles = [replica["role"] for replica in rig.looks[-1].replicas]
        settled_s = happens_s + rig.recovered_s(slo, happens_s)
        return {
            **told(rig, happens_s, min(settled_s, lasts_s), slo),
            "first_flip_s": min((flip for flip in flips if flip > happens_s), default=NEVER_S) - happens_s,
            "flips": len(flips),
            "prefill_after": roles.count("prefill"),
            "recovered_s": settled_s - happens_s,
        }


def cheaper(folder: Path, seed: int) -> Figures:
    """A cheaper GPU can be had: the service moves to it without a failed request."""
    happens_s, lasts_s = 25.0, 75.0
    rules = {"scaling": "replan", "window_s": 20, "replan_s": 3600, "grace_s": 15}
    with serving(write_spec(folder, 6.0, MARKET_NODES), rules) as rig:
        with rig.fired(shots_of([Phase(lasts_s, 4.5)], seed)):
            rig.sleep_until(happens_s)
            usd_before = rig.looks[-1].usd_per_h
            write_market(folder, {"1xA10": (6, 0.3)})
            happens_s = rig.now_s

            def moved(look: Seen) -> bool:
                return bool(look.replicas) and all("A10" in replica["template"] for replica in look.replicas)

            moved_s = rig.wait_for(moved, 50.0)
        settled_s = moved_s or lasts_s
        return {
            **told(rig, happens_s, settled_s),
            "plan_s": rig.note_s("plan", happens_s, "saves"),
            "moved_s": after(moved_s, happens_s),
            "usd_per_h_before": usd_before,
            "usd_per_h_after": rig.looks[-1].usd_per_h,
        }


def spot(folder: Path, seed: int) -> Figures:
    """A spot machine is said to go in 15 s, and goes: its replica was emptied and replaced before."""
    happens_s, lasts_s, notice_s = 10.0, 45.0, 15.0
    with serving(write_spec(folder, 6.0, "{node: 1xL4, available: 6}")) as rig:
        with rig.fired(shots_of([Phase(lasts_s, 4.0)], seed)):
            rig.sleep_until(happens_s)
            victim = next(item for item in rig.store.instances() if item.state == "up" and item.replica)
            line = f"  - {{engine: {victim.name}, at: {time.time() + notice_s:.0f}}}"
            write_market(folder, {"1xL4": (5, 0.6)}, line)
            happens_s = rig.now_s

            def left(look: Seen) -> bool:
                return all(item["replica"] != victim.replica for item in look.replicas)

            emptied_s = rig.wait_for(left, 2 * notice_s)
            rig.sleep_until(happens_s + notice_s)
            for pid, name in rig.engines():
                if name == victim.name:
                    os.killpg(pid.number, signal.SIGKILL)
        return {
            **told(rig, happens_s, happens_s + notice_s),
            "emptied_s": after(emptied_s, happens_s),
            "left_s": notice_s - after(emptied_s, happens_s),
        }


def sleep(folder: Path, seed: int) -> Figures:
    """Nobody asks for 8 s: all copies go. The next request is held until one is back."""
    spec = write_spec(folder, 3.0, "{node: 1xL4, available: 4}", more="    idle_s: 8\n")
    quiet_s, again_s = 6.0, 36.0
    with serving(spec, {"grace_s": 5}) as rig:
        rig.load([Phase(quiet_s, 1.5), Phase(again_s - quiet_s, 0.0), Phase(15.0, 1.5)], seed)
        asleep = [look.at_s for look in rig.looks if look.at_s > quiet_s and not look.replicas]
        first = min((shot for shot in rig.shots if shot.at_s >= again_s), key=lambda shot: shot.at_s)
        return {
            "requests": len(rig.shots),
            "lost": rig.lost,
            "asleep_s": min(asleep, default=NEVER_S) - quiet_s,
            "first_waited_s": first.ttft_s,
        }


def report(rig: Rig) -> None:
    for item in sorted(rig.store.happenings(most=1000), key=lambda note: note.at_s):
        if item.at_s - rig.zero_s > -5.0:
            say(f"  {item.at_s - rig.zero_s:7.2f}  {item.kind:8} {item.what}  ({item.why})")
    for line in rig.problems():
        say(f"  lost: {line}")


def after(at_s: float | None, happens_s: float) -> float:
    return NEVER_S if at_s is None else at_s - happens_s


def post(url: str, body: object) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()


KILLS = 20


def restarts(folder: Path, seed: int) -> Figures:
    """The controller is killed twenty times while copies are asked for and taken back; the gateway serves on."""
    spec = write_spec(folder, 3.0, "{node: 1xL4, available: 8}")
    plan = plan_as("melange", spec)
    (template,) = (deployment.template for deployment in plan.deployments)
    chance = random.Random(seed)
    with serving(spec, plan=plan) as rig:
        paths = (
            Path(__file__).with_name("adapt_controller.py"),
            rig.store.path.parent,
            spec,
            folder / "plan.json",
        )
        rig.command = [sys.executable, *map(str, paths)]
        twice = Twice(rig)
        with rig.fired(shots_of([Phase(KILLS * 7.0 + 30.0, 1.5)], seed)):
            twice.start()
            begun_s = rig.now_s
            for _ in range(KILLS):
                count = chance.randint(1, 4)
                _scale(rig, template, count)
                time.sleep(chance.uniform(0.0, 3.0))
                rig.process.kill()
                rig.process.wait()
                say(f"  {rig.now_s:7.2f}  killed; {count} copies wanted, {len(rig.engines())} engines there")
                rig.again()
                rig.controlled(30.0)
            _scale(rig, template, 2)
            killed_s = rig.now_s

            def settled(look: Seen) -> bool:
                return look.ready() == len(look.replicas) == 2 and len(rig.engines()) == 2

            done_s = rig.wait_for(settled, 60.0)
            known = {instance.name for instance in rig.store.instances()}
            orphans = [name for _, name in rig.engines() if name not in known]
            twice.end()
        return {
            **told(rig, begun_s, killed_s),
            "kills": KILLS,
            "starts": len(rig.notes("start")),
            "settled_s": after(done_s, killed_s),
            "orphans": len(orphans),
            "twice": twice.seen,
        }


class Twice(Background):
    """Looks for replicas that two engines are at once."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self._rig, self.seen = rig, 0

    def work(self) -> None:
        store = StateStore(self._rig.store.path)
        while not self.over.wait(0.2):
            lives = {name for _, name in self._rig.engines()}
            there = [one.replica for one in store.instances() if one.replica and one.name in lives]
            self.seen += len(there) - len(set(there))
        store.close()


def _scale(rig: Rig, template: str, count: int) -> None:
    newest = rig.store.plan()
    assert newest is not None
    plan = scaled(newest.plan, template, "east", count, {"east": 0.6})
    rig.client.set_plan(plan)
    rig.store.add_plan(plan, time.time(), f"{BY_HAND}: {count} copies")


DAYS = 9
RISE = 1.6
"""A jump that the days before had as well; a forecast follows one of this size within a bin of ten minutes."""
HIGH_BINS = 18


def ahead(folder: Path, seed: int) -> Figures:
    """Every morning at this time the rate rises by 60 %: copies come before it does. The state knows nine days."""
    base, rise_s, lasts_s = 3.0, 75.0, 120.0
    remember(folder / "state", base)
    rules = {"scaling": "ahead", "window_s": 20, "grace_s": 15}
    with serving(write_spec(folder, base), rules) as rig:
        rig.load([Phase(rise_s, base), Phase(lasts_s - rise_s, RISE * base)], seed)
        copies = rig.looks[0].ready()
        more_s = next((look.at_s for look in rig.looks if look.ready() > copies), NEVER_S)
        at_rise = [look for look in rig.looks if look.at_s <= rise_s]
        return {
            **told(rig, rise_s, rise_s + 20.0),
            "copies_before": copies,
            "copies_at_rise": at_rise[-1].ready(),
            "copies_after": rig.looks[-1].ready(),
            "asked_s": rig.news_s("another plan is asked for", 0.0),
            "lead_s": rise_s - more_s,
        }


def remember(state: Path, base_per_s: float) -> None:
    """Days that all rose at the time that it is now."""
    state.mkdir(parents=True, exist_ok=True)
    store = StateStore(state / "state.db")
    now = int(time.time() // BIN_S)
    for place in range(now - DAYS * DAY_BINS, now):
        high = (place - now) % DAY_BINS < HIGH_BINS
        store.add_rates(place, [(MODEL, base_per_s * (RISE if high else 1.0))])
    store.close()


def prfaas(folder: Path, seed: int) -> Figures:
    """Prompts get short and answers long: the threshold of the remote cluster follows, and local replicas that
    prefilled decode. Windows of 15 s for the threshold, 30 s for roles."""
    spec = folder / "potluck.yaml"
    spec.write_text(spec_text(REMOTE, **REMOTE_LOAD), "utf-8")
    happens_s, lasts_s = 45.0, 120.0
    slo = Slo(4.0, 0.06)
    rules = {"scaling": "prfaas", "window_s": 15, "global_window_s": 30}
    with serving(spec, rules, plan=plan_as("prfaas", spec)) as rig:
        rig.load([Phase(happens_s, 6.5, 1500, 60), Phase(lasts_s - happens_s, 6.5, 400, 170)], seed)
        sides = [sum(replica["role"] == "prefill" for replica in look.replicas) for look in rig.looks]
        flips = [at_s for at_s, what, _ in rig.news if " becomes " in what and at_s > happens_s]
        return {
            **told(rig, happens_s, happens_s + 45.0, slo),
            "first_threshold_s": rig.news_s(" may go over ", 0.0),
            "threshold_s": rig.news_s(" may go over ", happens_s),
            "thresholds": sum(" may go over " in what for _, what, _ in rig.news),
            "first_flip_s": min(flips, default=NEVER_S) - happens_s,
            "flips": len(flips),
            "prefill_before": sides[0],
            "prefill_after": sides[-1],
        }


def advise(folder: Path, seed: int) -> Figures:
    """Three times the load, and nothing may be changed: what would be done is said."""
    base, up_s, end_s = 2.4, 25.0, 60.0
    rules = {"scaling": "cauchy", "window_s": 15, "grace_s": 10}
    with serving(write_spec(folder, 3.0), rules, "--advise") as rig:
        rig.load([Phase(up_s, base), Phase(end_s - up_s, 3 * base)], seed)
        notes = rig.notes("brain", "advice")
        advice = [n.at_s - rig.zero_s for n in notes if "advice" in (n.kind, n.what.partition(":")[0])]
        begun = [note for note in rig.notes("start", "stop") if note.at_s > rig.zero_s]
        newest = rig.store.plan()
        return {
            **told(rig, up_s, end_s, SLO),
            "advice": len(advice),
            "first_advice_s": min((at_s for at_s in advice if at_s > up_s), default=NEVER_S) - up_s,
            "changed": len(begun) + len({look.ready() for look in rig.looks}) - 1,
            "plans": 0 if newest is None else newest.version,
        }


SCENARIOS: dict[str, Callable[[Path, int], Figures]] = {
    scenario.__name__: scenario
    for scenario in (slow, killed, surge, shift, cheaper, spot, sleep, restarts, ahead, prfaas, advise)
}
