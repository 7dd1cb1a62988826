"""`potluck up` without arguments: the demo fleet is planned, simulated, started, queried and stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from potluck.control.launchers.local_launcher import engines_of
from potluck.control.local_stack import owner_of
from potluck.control.state_store import StateStore
from potluck.core.values.plan import Plan

WITHIN_S = 400.0


def test_demo_service_is_simulated_answers_and_leaves_no_processes(tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [sys.executable, "-m", "potluck.cli.main", "up", "--check", "--json"]
    command += ["--port", "0", "--state", str(state), "--within", str(WITHIN_S - 60)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["models"] == ["words"]
    assert [item["text"] != "" for item in body["answers"]] == [True]
    assert any("SLO attainment" in line for line in body["lines"]), body["lines"]
    store = StateStore(state / "state.db")
    try:
        version = store.plan()
        assert store.instances() == ()
        assert list(engines_of(owner_of(store))) == []
    finally:
        store.close()
    assert version is not None
    _must_share_prompts_in_every_way(version.plan)
    fork_server = (state / "logs" / "fork-server.log").read_text()
    assert "Traceback" not in fork_server, fork_server
    if os.path.exists("/proc/self/smaps_rollup"):
        forked = [log for log in (state / "logs").glob("words-*.log") if '"url"' in log.read_text()]
        assert len(forked) >= 3


def _must_share_prompts_in_every_way(plan: Plan) -> None:
    done = {(share.template, share.phase) for share in plan.shares}
    both = [template for template, phase in done if phase == "decode" and (template, "closed") in done]
    assert both, "served whole, beside what others prefilled"
    ways = {(flow.prefill_region, flow.decode_region) for flow in plan.flows}
    assert any(prefill == decode for prefill, decode in ways), "computed and answered apart, in one region"
    assert any(prefill != decode for prefill, decode in ways), "computed in another region"
