"""`potluck up` with nothing said: the demo fleet, planned, rehearsed, started, asked and stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from potluck.cli.serving.up import demo
from potluck.cli.serving.up_plan import Wishes, prepared
from potluck.cli.trying.simulation import read_one_spec
from potluck.control.ending import owner_of
from potluck.control.launch.local import engines_of
from potluck.control.store.store import Store

WITHIN_S = 400.0


def test_the_demo_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [sys.executable, "-m", "potluck.cli.main", "up", "--check", "--averages", "--json"]
    command += ["--port", "0", "--state", str(state), "--within", str(WITHIN_S - 60)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["models"] == ["words"]
    assert [each["text"] != "" for each in said["answers"]] == [True]
    store = Store(state / "state.db")
    try:
        assert store.instances() == ()
        assert list(engines_of(owner_of(store))) == []
    finally:
        store.close()
    nursery = (state / "logs" / "nursery.log").read_text()
    assert "Traceback" not in nursery, nursery
    if os.path.exists("/proc/self/smaps_rollup"):
        forked = [log for log in (state / "logs").glob("words-*.log") if '"url"' in log.read_text()]
        assert len(forked) >= 3


def test_the_demo_is_rehearsed_into_a_fleet_that_shares_prompts_in_every_way() -> None:
    spec = read_one_spec((demo(),))
    found = prepared((demo(),), spec, Wishes(30.0), lambda line: None)
    plan = found.inputs.plan
    kinds = {plan.template(each.template).kind for each in plan.deployments}
    assert "pair" in kinds, "a prompt begun on one GPU and ended on another"
    ways = {(flow.prefill_region, flow.decode_region) for flow in plan.flows}
    assert any(prefill == decode for prefill, decode in ways), "computed and answered apart, in one region"
    assert any(prefill != decode for prefill, decode in ways), "computed in another region"
    assert any("holds its" in line for line in found.lines), found.lines
    plain = prepared((demo(),), spec, Wishes(30.0, averages=True), lambda line: None)
    assert plain.lines == ()
    assert plain.inputs.plan.cost_usd_per_h <= plan.cost_usd_per_h
