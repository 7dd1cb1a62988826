"""More that happens to the service in `adapt.py`: a rise that the days before had, other lengths for a remote prefill
cluster, and a service that may only recommend."""

from __future__ import annotations

import time
from pathlib import Path

from parts.adapt_rig import MODEL, Phase, service
from parts.adapt_scenarios import (
    NEVER_S,
    OUTPUT,
    PROMPT,
    SLO,
    Figures,
    Say,
    after,
    plan_as,
    report,
    told,
    write_plan,
    write_spec,
)
from potluck.control.state_store import StateStore
from potluck.core.scaling.forecast import BIN_S, DAY
from potluck.core.values.types import Slo

DAYS = 9
RISE = 1.6
"""A jump that the days before had as well; a forecast follows one of this size within a bin of ten minutes."""
HIGH_BINS = 18
REMOTE = """kv_codecs: [raw, int8, int4]
models:
  - model: Llama-3.1-8B
    name: {model}
    slo: {{ttft_ms: 4000, tpot_ms: 60}}
    traffic: {{rate_per_s: 10, input: {{mean: 1500, cv: 1.0}}, output: {{mean: 60, cv: 0.5}}}}
fleet:
  regions:
    - {{name: near, nodes: [{{node: 1xA10, available: 8}}]}}
    - {{name: far, nodes: [{{node: 1xL40S, available: 1}}]}}
links:
  - {{from: far, to: near, gbps: 40, rtt_ms: 10}}
  - {{from: near, to: far, gbps: 0.05, rtt_ms: 10}}
policy:
  classes: [{{name: standard, late: true, max_wait_s: 120}}]
"""


def ahead(folder: Path, seed: int, say: Say) -> Figures:
    """Every morning at this time the rate rises by 60 %: copies come before it does. The state knows nine days."""
    base, rise_s, lasts_s = 3.0, 75.0, 120.0
    spec = write_spec(folder, base, "{node: 1xL4, available: 10}")
    plan = plan_as("melange", spec)
    remember(folder / "state", base)
    rules = {"scaling": "ahead", "window_s": 20, "grace_s": 15}
    with service(folder, [write_plan(plan, spec), spec], rules) as rig:
        phases = [Phase(rise_s, base, PROMPT, OUTPUT), Phase(lasts_s - rise_s, RISE * base, PROMPT, OUTPUT)]
        with rig.loaded(phases, seed):
            pass
        copies = rig.looks[0].ready()
        more_s = next((each.at_s for each in rig.looks if each.ready() > copies), NEVER_S)
        at_rise = [each for each in rig.looks if each.at_s <= rise_s]
        report(rig, say)
        return {
            **told(rig, rise_s, rise_s + 20.0),
            "copies_before": copies,
            "copies_at_rise": at_rise[-1].ready(),
            "copies_after": rig.looks[-1].ready(),
            "asked_s": after(rig.news_s("another plan is asked for", 0.0), 0.0),
            "lead_s": rise_s - more_s,
        }


def remember(state: Path, base_per_s: float) -> None:
    """Days that all rose at the time that it is now."""
    state.mkdir(parents=True, exist_ok=True)
    store = StateStore(state / "state.db")
    now = int(time.time() // BIN_S)
    for place in range(now - DAYS * DAY, now):
        high = (place - now) % DAY < HIGH_BINS
        store.add_rates(place, [(MODEL, base_per_s * (RISE if high else 1.0))])
    store.close()


def prfaas(folder: Path, seed: int, say: Say) -> Figures:
    """Prompts get short and answers long: the threshold of the remote cluster follows, and local replicas that
    prefilled decode. Windows of 15 s for the threshold, 30 s for roles."""
    spec = folder / "potluck.yaml"
    spec.write_text(REMOTE.format(model=MODEL), "utf-8")
    happens_s, lasts_s = 45.0, 120.0
    slo = Slo(4.0, 0.06)
    rules = {"scaling": "prfaas", "window_s": 15, "global_window_s": 30}
    with service(folder, [write_plan(plan_as("prfaas", spec), spec), spec], rules) as rig:
        phases = [Phase(happens_s, 6.5, 1500, 60), Phase(lasts_s - happens_s, 6.5, 400, 170)]
        with rig.loaded(phases, seed):
            pass
        sides = [sum(each["role"] == "prefill" for each in look.replicas) for look in rig.looks]
        flips = [at_s for at_s, what, _ in rig.news if " becomes " in what and at_s > happens_s]
        report(rig, say)
        return {
            **told(rig, happens_s, happens_s + 45.0, slo),
            "first_threshold_s": after(rig.news_s(" may go over ", 0.0), 0.0),
            "threshold_s": after(rig.news_s(" may go over ", happens_s), happens_s),
            "thresholds": sum(" may go over " in what for _, what, _ in rig.news),
            "first_flip_s": min(flips, default=NEVER_S) - happens_s,
            "flips": len(flips),
            "prefill_before": sides[0],
            "prefill_after": sides[-1],
        }


def advise(folder: Path, seed: int, say: Say) -> Figures:
    """Three times the load, and nothing may be changed: what would be done is said."""
    base, up_s, end_s = 2.4, 25.0, 60.0
    spec = write_spec(folder, 3.0, "{node: 1xL4, available: 10}")
    rules = {"scaling": "cauchy", "window_s": 15, "grace_s": 10}
    with service(folder, [write_plan(plan_as("melange", spec), spec), spec], rules, ["--advise"]) as rig:
        phases = [Phase(up_s, base, PROMPT, OUTPUT), Phase(end_s - up_s, 3 * base, PROMPT, OUTPUT)]
        with rig.loaded(phases, seed):
            pass
        said = [each.at_s - rig.zero_s for each in rig.notes("brain", "advice") if _advises(each)]
        begun = [each for each in rig.notes("start", "stop") if each.at_s > rig.zero_s]
        newest = rig.store.plan()
        report(rig, say)
        return {
            **told(rig, up_s, end_s, SLO),
            "advice": len(said),
            "first_advice_s": min((each for each in said if each > up_s), default=NEVER_S) - up_s,
            "changed": len(begun) + len({each.ready() for each in rig.looks}) - 1,
            "plans": 0 if newest is None else newest.version,
        }


def _advises(each: object) -> bool:
    return "advice" in (getattr(each, "kind", ""), str(getattr(each, "what", "")).partition(":")[0])
