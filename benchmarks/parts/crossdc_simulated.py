"""What `crossdc.py` simulates: links of many widths under a hybrid and a dense model, and prompts with prefixes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from math import log10
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parts.case_study import (
    FAR,
    MODEL,
    NAME,
    NEAR,
    SELECTIVE,
    Arrangement,
    kv_bytes,
    load,
    prompt_lengths,
    scene,
    site,
    write_plan,
    write_profiles,
)
from parts.common import DATA, ROOT, prefixed, say
from potluck.cli.common.inputs import read_spec
from potluck.cli.common.workloads import WorkloadOptions
from potluck.cli.common.workloads import load as load_trace
from potluck.core.routing.prefix_affinity import PrefixAffinity
from potluck.core.routing.routing_table import RouteOptions
from potluck.core.state.request_state import RequestState
from potluck.plan.allocate.program import DemandBucket, FlowProgram, LinkRow, ModelColumns, NodeSupply
from potluck.plan.allocate.solve import solve
from potluck.sim.load.workload import PrefixBlocks, Workload, workload
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world.faults import Fault, Faults

from papers.pages import svg  # isort: skip
from papers.prfaas_model import optimum  # isort: skip
from papers.rows import Line, Plot  # isort: skip

MODELS = {"hybrid": MODEL, "dense": "MiniMax-M2.5"}
"""The dense one is timed as the hybrid one: they differ in nothing but KV, 17 and 254 kB a token."""
WIDTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
SECONDS, OVER = 120.0, 1.2
PARTS, ASKED = 32, 10.0  # Of lengths, and requests/s: more than can be served.
BLOCK = 512  # Tokens; a state is kept after the last full one of a prompt.
WIDE_GBPS, NARROW_GBPS, PHASE_S = 18.0, 6.0, 45.0
THRESHOLDS = range(15_000, 45_001, 3000)
TRACE = DATA / "mooncake_fast25_conversation.jsonl.gz"


def dense(quick: bool) -> dict[str, float]:
    """By model and Gbps: requests/s with the far site over those without, as the throughput model has it, as the
    planner's program has it, and simulated with the former's threshold; which share of requests each sends far."""
    figures: dict[str, float] = {}
    alone = replace(SELECTIVE, far=0, threshold_tokens=None)
    near = optimum(site(alone, 1.0), prompt_lengths())
    near_per_s = served(
        replace(alone, prefill=near.prefill, decode=near.decode), 1.0, MODEL, near.rate_per_s
    )[0]
    for kind, name in MODELS.items():
        for gbps in WIDTHS[::2] if quick else WIDTHS:
            best = optimum(site(SELECTIVE, gbps, name), prompt_lengths())
            cut = round(best.threshold_tokens)
            what = replace(SELECTIVE, prefill=best.prefill, decode=best.decode, threshold_tokens=cut or None)
            per_s, far = served(what, gbps, name, best.rate_per_s)
            planned_per_s, planned_far = planned(gbps, name)
            values = {
                "modelled": best.rate_per_s / near.rate_per_s,
                "planned": planned_per_s / near.rate_per_s,
                "simulated": per_s / near_per_s,
                "modelled_far": best.remote_share,
                "planned_far": planned_far,
                "simulated_far": far,
            }
            figures |= prefixed(f"dense_{kind}_{gbps:g}gbps", values)
    if not quick:
        draw(figures)
    return figures


def draw(figures: dict[str, float]) -> None:
    """The page's plot."""
    ways = {"modelled": "throughput model", "planned": "planner", "simulated": "simulated"}
    x = tuple(log10(gbps) for gbps in WIDTHS)
    lines = [
        Line(f"{kind}, {text}", x, tuple(figures[f"dense_{kind}_{gbps:g}gbps_{way}"] for gbps in WIDTHS))
        for kind in MODELS
        for way, text in ways.items()
    ]
    y = "requests/s with the far site, of those without"
    (ROOT / "docs" / "offload.svg").write_text(
        svg(Plot("offload", "log10 of Gbps", y, tuple(lines))), "utf-8"
    )


def served(what: Arrangement, gbps: float, name: str, per_s: float) -> tuple[float, float]:
    """First tokens a second when more is asked than can be served, and the share computed far."""
    result = simulated(what, gbps, load(OVER * per_s, SECONDS, 1), name)
    far = np.array([replica.region == FAR for replica in result.replicas])[result.records.prefill_replica]
    return rate_per_s(result.records.first_token_s, SECONDS / 3, SECONDS), float(far.mean())


def simulated(
    what: Arrangement,
    gbps: float,
    workload: Workload,
    catalog: str = MODEL,
    adapts: bool = True,
    faults: Faults | None = None,
) -> SimResult:
    with tempfile.TemporaryDirectory() as name:
        profiles, files = write_profiles(Path(name), catalog), write_plan(Path(name), what, gbps, catalog)
        policy = replace(read_spec(files[1]).policy, adapt_threshold=adapts)
        resolved = scene(*files, profiles if what.far else profiles[1:])
        settings = SimSettings(report_period_s=1.0) if faults else None  # As often as gateways look at links.
        return simulate(resolved, workload, policy, faults=faults, settings=settings)


def rate_per_s(first_s: NDArray[np.float64], from_s: float, to_s: float) -> float:
    return float(((first_s >= from_s) & (first_s < to_s)).sum() / (to_s - from_s))


def phase_per_s(first_s: NDArray[np.float64], place: int = 0) -> float:
    """First tokens a second in the latter two thirds of a phase."""
    return rate_per_s(first_s, (place + 1 / 3) * PHASE_S, (place + 1) * PHASE_S)


def best_threshold(gbps: float, workload: Workload, among: Iterable[int]) -> tuple[int, float]:
    """That which stays as it is and has the highest goodput of a phase, simulated; and its goodput."""
    figures = {}
    for tokens in among:
        what = replace(SELECTIVE, threshold_tokens=tokens)
        first_s = simulated(what, gbps, workload, adapts=False).records.first_token_s
        figures[tokens] = phase_per_s(first_s), -first_s.mean()
    best = max(figures, key=figures.__getitem__)
    return best, figures[best][0]


def three_phases(made: Workload) -> Workload:
    columns = np.tile(made.prompt_tokens, 3), np.tile(made.output_tokens, 3)
    return workload(NAME, np.concatenate([made.arrival_s + n * PHASE_S for n in range(3)]), *columns)


def dropped(workload: Workload, among: Iterable[int] = THRESHOLDS) -> list[float]:
    """By phase, goodput with a threshold that moves over that of the best that stays: a link, a third, the link."""
    fault = Fault(PHASE_S, "link", source=FAR, target=NEAR, gbps=NARROW_GBPS, duration_s=PHASE_S)
    moving = simulated(SELECTIVE, WIDE_GBPS, three_phases(workload), faults=Faults((fault,)))
    wide, narrow = (best_threshold(gbps, workload, among)[1] for gbps in (WIDE_GBPS, NARROW_GBPS))
    first_s = moving.records.first_token_s
    return [phase_per_s(first_s, place) / best for place, best in enumerate((wide, narrow, wide))]


def planned(gbps: float, name: str) -> tuple[float, float]:
    """The most requests/s that the planner's program finds for the study's instances, and the share far."""
    at = site(SELECTIVE, gbps, name)
    tokens = np.array([part.mean() for part in np.array_split(np.sort(prompt_lengths().tokens), PARTS)])
    buckets = tuple(DemandBucket(f"{n:.0f}", ASKED / PARTS, float(at.kv_bytes.at(n)) * 8) for n in tokens)
    prefill, decode = np.zeros((3, PARTS)), np.zeros((3, PARTS))
    prefill[0], prefill[1], decode[2] = (
        1 / at.remote_prefill_s.at(tokens),
        1 / at.local_prefill_s.at(tokens),
        1 / at.hold_s,
    )
    uses = np.array([[1, 0], [0, 1], [0, 1]], np.uint8)
    supply = np.array([[at.remote_instances, 0], [0, at.local_instances]])
    node_supply = NodeSupply((FAR, NEAR), ("H200", "H20"), np.ones((2, 2)), supply)
    model = ModelColumns("m", buckets, uses, prefill, decode, np.zeros((3, PARTS)), ordered=True)
    result = solve(FlowProgram(node_supply, (model,), (LinkRow(0, 1, gbps * 1e9),)), time_limit_s=20.0)
    rates = [sum(flow.rate_per_s for flow in result.flows if flow.source == place) for place in (0, 1)]
    return result.fraction * ASKED, rates[0] / max(1e-9, sum(rates))


def prefixes(quick: bool) -> dict[str, float]:
    """Bytes over the link, beside those of whole prompts, and who was computed where less of it was held than in the
    other region at that time."""
    if not TRACE.exists():
        say(f"crossdc: prefixes is left out, there is no {TRACE.name}")
        return {}
    workload = load_trace(str(TRACE), "m", WorkloadOptions(rate_per_s=2.5, requests=1000 if quick else 6000))
    assert workload.blocks is not None
    parts = [
        workload.blocks.ids[start : start + tokens // BLOCK]
        for start, tokens in zip(workload.blocks.starts, workload.prompt_tokens, strict=False)
    ]
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    workload = replace(
        workload,
        blocks=PrefixBlocks(starts, np.concatenate(parts)),
        output_tokens=np.full(len(workload), 256, np.int32),
    )
    figures: dict[str, float] = {}
    for kind, name in MODELS.items():
        figures |= prefixed(f"prefixes_{kind}", crossed(workload, name))
    return figures


def crossed(workload: Workload, name: str) -> dict[str, float]:
    held: dict[str, dict[str, int]] = {}
    look = PrefixAffinity.cached_by_region

    def noted(self: PrefixAffinity, request: RequestState, route_options: RouteOptions) -> dict[str, int]:
        return held.setdefault(request.request.id, look(self, request, route_options))

    PrefixAffinity.cached_by_region = noted  # type: ignore[method-assign]
    try:
        result = simulated(replace(SELECTIVE, threshold_tokens=8000), 100.0, workload, name)
    finally:
        PrefixAffinity.cached_by_region = look  # type: ignore[method-assign]
    records = result.records
    regions = np.array([replica.region for replica in result.replicas])[records.prefill_replica]
    far = regions == FAR
    whole = kv_bytes(records.prompt_tokens, name)
    moved = sum(link.sent_bytes for link in result.links if (link.source, link.target) == (FAR, NEAR))
    wrong = 0
    for request, found in held.items():
        place, most = int(request), max(found.values(), default=0)
        wrong += most > found.get(regions[place], 0) and records.cached_tokens[place] < most - BLOCK
    return {
        "requests": float(len(records)),
        "far_share": float(far.mean()),
        "cached_share": float(records.cached_tokens.sum() / records.prompt_tokens.sum()),
        "crossed_gb": moved * 1e-9,
        "crossed_whole_gb": float(whole[far].sum()) * 1e-9,
        "crossed_share": moved / float(whole[far].sum()),
        "wrong_share": wrong / len(records),
    }
