"""`potluck profile --live`: what the replicas of a running service really take, as profiles."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck.cli.common.render import emit_json, table
from potluck.cli.serving.operate.which_service import nothing, opened
from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.core.values.observed_speed import ObservedSpeed
    from potluck.perf.timers.profile import Profile


def write_live(state: Path | None, out: Path, as_json: bool) -> None:
    """A file for each kind of node that enough was seen of: `out`, or several beside it."""
    from potluck.perf.timers.profile import profile_to_json

    found = _observed(state)
    files = []
    for pace, profile in found:
        path = out if len(found) == 1 else out.with_stem(f"{out.stem}-{pace.model}-{pace.node}-tp{pace.tp}")
        try:
            path.write_text(profile_to_json(profile), "utf-8")
        except OSError as error:
            raise InputError("--out", f"{path} cannot be written ({error.strerror or error})") from error
        files.append(path)
    rows = [
        [each.model, each.node, each.tp, f"{each.pace:.2f}", each.replicas, path]
        for (each, _), path in zip(found, files, strict=True)
    ]
    names = ("model", "node", "tp", "pace", "replicas", "file")
    if as_json:
        emit_json(
            [
                dict(zip(names, [*row[:3], pace.pace, pace.replicas, str(row[-1])], strict=True))
                for row, (pace, _) in zip(rows, found, strict=True)
            ]
        )
        return
    table("", names, rows)
    click.echo("`plan`, `simulate`, `goodput`, `estimate` and `serve` read them with --profile")


def _observed(state: Path | None) -> list[tuple[ObservedSpeed, Profile]]:
    from potluck.cli.common.problem_options import load_problem, read_spec
    from potluck.cli.planning.estimate_command import measured
    from potluck.control.decision_history import ENOUGH, LOOK_S, paces_of
    from potluck.plan.replan.observed_profiles import profile_of

    with opened(state, running=False) as service:
        known = service.store.get("spec files") or {}
        paces = paces_of(service.store, time.time())
        folder = service.folder
    if not paces or "path" not in known:
        raise nothing(
            f"too little was seen in {folder} yet: replicas must work for {ENOUGH * LOOK_S:.0f} s or more"
        )
    profiles = tuple(Path(each) for each in known.get("profiles", ()))
    problem = measured(load_problem(read_spec(Path(known["path"])), 0.8, None, (), 0.0), profiles)
    day = datetime.now(UTC).date().isoformat()
    asks = {ask.name: ask for ask in problem.asks}
    return [(pace, profile_of(problem, asks[pace.model], pace, day)) for pace in paces if pace.model in asks]
