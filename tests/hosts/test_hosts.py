"""Engines and two gateways on hosts of their own, with TLS and keys between them; what may happen to hosts happens.

A small part of benchmarks/hosts.py, which has the figures.
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
from hosts_fleet import HostsFleet
from live_plans import COMBO, MODEL, WHOLE, write_plans

from hosts import Bed, missing

ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = ROOT / "src" / "potluck" / "engine" / "data" / "words"
sys.path.insert(0, str(ROOT / "benchmarks"))

from parts.hosts_load import Load, wrong  # noqa: E402
from parts.hosts_troubles import Troubles, within  # noqa: E402

WHOLE_ONE, PREFILL, DECODE = 0, 1, 2


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    why_not = missing()
    if why_not and os.environ.get("CI"):
        pytest.fail(f"must not be left out here: {why_not}")
    if why_not:
        pytest.skip(why_not)
    with Bed(5) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsFleet]:
    plan, spec = write_plans(tmp_path_factory.mktemp("plan"), WHOLE + COMBO)
    words = ("--files", f"{MODEL}={WORDS}")
    odd = {WHOLE_ONE: {"clock_s": -86_400.0}, DECODE: {"clock_s": 7 * 86_400.0}}
    with HostsFleet(bed, plan, spec, gateways=2, gateway=words, odd=odd) as made:
        yield made


def handed_over(fleet: HostsFleet) -> float:
    """Requests that the gateways sent over more than one engine."""
    lines = [line for place in range(2) for line in fleet.metrics(place)]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("potluck_routes_total") and 'kind="prefill_decode"' in line
    )


def knows(fleet: HostsFleet, gateway: int, version: str) -> bool:
    """Whether a gateway has the decode engine in this version, and all others."""
    found = {each["url"]: each for each in fleet.ask(gateway, "/snapshot")["engines"]}
    return found[fleet.roster[DECODE]["url"]]["version"] == version and fleet.serving(gateway) == 3


def test_no_request_is_lost_whatever_becomes_of_hosts(fleet: HostsFleet) -> None:
    """One is cut off, one slowed, one killed and started again as an older release; clocks are days apart."""
    load = Load(fleet, 3.0)
    load.start()
    troubles = Troubles(fleet, last_s=0.5)
    within(lambda: handed_over(fleet) > 2)
    times = {
        "cut off": troubles.cut(WHOLE_ONE),
        "slowed": troubles.slow(PREFILL, 4e3),
        "killed, then older": troubles.kill(DECODE, {"kv_version": 1, "version": "0.0.9"}),
    }
    within(lambda: all(knows(fleet, gateway, "0.0.9") for gateway in range(2)))
    before, sent = handed_over(fleet), len(load.shots)
    within(lambda: len(load.shots) >= sent + 12)
    assert handed_over(fleet) == before, "to and from the older release nothing is handed over"
    shots = load.end()
    for name, each in times.items():
        sys.stdout.write(f"{name}: noticed after {each.noticed_s:.1f} s, back after {each.back_s:.1f} s\n")
    assert wrong(fleet, shots, by=WHOLE_ONE) == []
    assert {"https"} == {str(each["url"]).partition(":")[0] for each in fleet.roster}


def test_nobody_gets_in_without_the_key_nor_is_believed_without_a_certificate(fleet: HostsFleet) -> None:
    url = str(fleet.roster[WHOLE_ONE]["url"])
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"{url}/status", timeout=10, context=fleet.tls)
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"{fleet.gateways[0].admin}/snapshot", timeout=10, context=fleet.tls)
    strangers = ssl.create_default_context()
    for each in (url, fleet.gateways[0].url, fleet.gateways[0].admin):
        with pytest.raises(URLError, match="certificate verify failed"):
            urlopen(f"{each}/health", timeout=10, context=strangers)
    with pytest.raises(OSError, match=r".*"):
        urlopen(f"http{url.removeprefix('https')}/health", timeout=10)
