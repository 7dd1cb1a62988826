"""Engines and a gateway on hosts of their own, with TLS and keys between them; what may happen to hosts happens.

One story over one fleet, since each process takes seconds to start. benchmarks/hosts.py has the figures.
"""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
from host_bed import Bed, missing
from hosts_fleet import HostsFleet
from live_plans import COMBO, MODEL, WHOLE, write_plans

ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = ROOT / "src" / "potluck" / "engine" / "data" / "words"
sys.path.insert(0, str(ROOT / "benchmarks"))

from parts.hosts_load import Load, Troubles, within, wrong  # noqa: E402

WHOLE_ONE, PREFILL, DECODE = 0, 1, 2
OLDER = "0.0.9"


@pytest.fixture
def bed() -> Iterator[Bed]:
    why_not = missing()
    if why_not and os.environ.get("CI"):
        pytest.fail(f"must not be left out here: {why_not}")
    if why_not:
        pytest.skip(why_not)
    with Bed(4) as made:
        yield made


@pytest.mark.slow
def test_host_failures_clock_skew_and_takeover_lose_no_request(bed: Bed, tmp_path: Path) -> None:
    """Clocks are days apart; one host is cut off, one slowed, one killed and started again as an older release; then
    another gateway takes the first one's ports."""
    plan, spec = write_plans(tmp_path, WHOLE + COMBO)
    gateway = ("--files", f"{MODEL}={WORDS}")
    odd = {WHOLE_ONE: {"clock_s": -86_400.0}, DECODE: {"clock_s": 7 * 86_400.0}}
    with HostsFleet(bed, plan, spec, gateway=gateway, odd=odd, takeover=True) as fleet:
        assert_strangers_refused(fleet)
        load = Load(fleet, 2.0)
        load.start()
        cause_failures(fleet, load)
        take_over_gateway(fleet, load)
        assert wrong(fleet, load.sent(), by=WHOLE_ONE) == []


def assert_strangers_refused(fleet: HostsFleet) -> None:
    """Nobody gets in without a key, nor is believed without a certificate of ours."""
    url = str(fleet.engine_list[WHOLE_ONE]["url"])
    for item in (f"{url}/status", f"{fleet.gateways[0].admin}/snapshot"):
        with pytest.raises(HTTPError, match="401"):
            urlopen(item, timeout=10, context=fleet.tls)
    strangers = ssl.create_default_context()
    for entry in (url, fleet.gateways[0].url, fleet.gateways[0].admin):
        with pytest.raises(URLError, match="certificate verify failed"):
            urlopen(f"{entry}/health", timeout=10, context=strangers)
    with pytest.raises(OSError, match=r".*"):
        urlopen(f"http{url.removeprefix('https')}/health", timeout=10)


def cause_failures(fleet: HostsFleet, load: Load) -> None:
    troubles = Troubles(fleet, last_s=0.5)
    within(lambda: transferred_requests(fleet) > 2)
    times = {
        "cut off": troubles.cut(WHOLE_ONE),
        "slowed": troubles.slow(PREFILL, 4e3),
        "killed, then older": troubles.kill(DECODE, {"kv_version": 1, "version": OLDER}),
    }
    for name, time in times.items():
        sys.stdout.write(f"{name}: noticed after {time.noticed_s:.1f} s, back after {time.back_s:.1f} s\n")
    within(lambda: OLDER in engine_releases(fleet))
    before, sent = transferred_requests(fleet), len(load.shots)
    within(lambda: len(load.shots) >= sent + 6)
    assert transferred_requests(fleet) == before, "to and from the older release nothing is handed over"


def take_over_gateway(fleet: HostsFleet, load: Load) -> None:
    """The gateway by a successor, which takes its ports while answers are under way."""
    before, sent = fleet.succeed(0), len(load.shots)
    within(lambda: len(load.shots) >= sent + 4)
    within(lambda: before.popen is not None and before.popen.poll() == 0)
    assert OLDER in engine_releases(fleet)


def transferred_requests(fleet: HostsFleet) -> float:
    """Requests that the gateway sent over more than one engine."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in fleet.metrics(0)
        if line.startswith("potluck_routes_total") and 'kind="prefill_decode"' in line
    )


def engine_releases(fleet: HostsFleet) -> list[str]:
    """Releases of the engines that the gateway sends to."""
    result = fleet.ask(0, "/snapshot")
    serve = {item["url"] for item in result["replicas"] if item["state"] == "ready"}
    return [item["version"] for item in result["engines"] if item["url"] in serve]
