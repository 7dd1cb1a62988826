"""Lossy KV transfers of a plan are reported by `up`, `status` and the page."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.cli.fleet import status
from potluck.cli.up.run_service import ServiceSummary
from potluck.cli.up.up import ready_json, show_ready
from potluck.control.service_view import ServiceView
from potluck.control.state_store import StateStore
from potluck.core.values.plan import Deployment, Plan, PlannedFlow
from potluck.core.values.types import Codec
from potluck.gateway.page.snapshot import notices
from potluck.gateway.values import GatewaySettings

LINE = "KV of words crosses west → east in int8 (lossy: allowed by kv_codecs)"


def plan(codec: Codec) -> Plan:
    flows = (PlannedFlow("words", 0, "west", "east", 1.0, codec),)
    return Plan("auto", (), (Deployment("words: prefill", "west", 1),), (), (), flows, (), 1.0, 0.0)


@pytest.mark.parametrize(("codec", "lines"), [("int8", [LINE]), ("fp16", [])])
def test_lossy_kv_transfer_is_reported_by_up_status_and_page(
    codec: Codec, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = ServiceSummary("http://h:1", ("words",), plan(codec), (), 1.0)
    show_ready(served)
    assert capsys.readouterr().out.splitlines()[2 : 2 + len(lines)] == lines
    assert ready_json(served)["notices"] == lines
    store = StateStore(tmp_path / "state.db")
    store.add_plan(plan(codec), 1.0, "for a test")
    store.close()
    service = ServiceView(tmp_path)
    try:
        result = service.status(2.0)
    finally:
        service.close()
    assert result["plan"]["notices"] == lines
    status._show(result, 2.0)
    shown = capsys.readouterr().out.splitlines()
    assert shown[2 : 2 + len(lines)] == [f"notice: {line}" for line in lines]
    watch = SimpleNamespace(lateness=SimpleNamespace(slowdown=1.0))
    registry = SimpleNamespace(engines=())
    core: Any = SimpleNamespace(plan=plan(codec), watch=watch, registry=registry)
    assert [*notices(core, GatewaySettings())] == lines
