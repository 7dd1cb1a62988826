"""`potluck fleet upgrade` over local processes: engines and the gateway are replaced while requests arrive."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from live_fleet import LiveFleet
from live_plans import MODEL, WHOLE, write_plans

from potluck.cli.main import cli
from potluck.core.errors import InputError

ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = ROOT / "src" / "potluck" / "engine" / "data" / "words"
sys.path.insert(0, str(ROOT / "benchmarks"))

from parts.hosts_load import Load, Upkeep, within, wrong  # noqa: E402


@pytest.mark.slow
def test_upgrade_replaces_engines_and_gateway_without_failed_requests(tmp_path: Path) -> None:
    plan, spec = write_plans(tmp_path, WHOLE * 2)
    key = tmp_path / "admin.key"
    key.write_text("what operators show")
    gateway = ("--files", f"{MODEL}={WORDS}", "--takeover", str(tmp_path / "gateway.sock"))
    gateway += ("--admin-key-file", str(key))
    with LiveFleet(plan, spec, gateway=gateway, engine=("--mock", "--end-when-drained")) as fleet:
        first = [item.popen for item in fleet.engines]
        upkeep, load = Upkeep(fleet, fleet.restart), Load(fleet, 4.0)
        upkeep.start()
        load.start()
        refused = CliRunner().invoke(cli, ["fleet", "upgrade", "--at", fleet.admin])
        assert isinstance(refused.exception, InputError), "at once: to ask again would be in vain"
        done = CliRunner().invoke(cli, ["fleet", "upgrade", "--at", fleet.admin, "--key-file", str(key)])
        assert done.exit_code == 0, done.output
        assert done.output.splitlines()[-1] == "2 copies replaced"
        assert all(item is not None and item.poll() == 0 for item in first), "both ended by themselves"
        before, sent = fleet.succeed(), len(load.shots)
        within(lambda: len(load.shots) >= sent + 4)
        shots = load.sent()
        within(lambda: before.popen is not None and before.popen.poll() == 0)
        upkeep.end()
        assert upkeep.started == 2
        assert wrong(fleet, shots, by=0) == []
