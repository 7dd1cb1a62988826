"""A gateway in each of two regions, over one plan: each its own network namespace, and the link between them cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_bed import Bed, missing
from hosts_fleet import Gateway, HostsFleet
from live_plans import MODEL, REMOTE, Unit, write_plans

WORDS = Path(__file__).resolve().parent.parent.parent / "src" / "potluck" / "engine" / "data" / "words"
REGIONS = ("far", "near")
UNITS: list[Unit] = [*REMOTE, ("homogeneous", ("mixed",), "far")]
ASK = """import json, ssl, sys, urllib.request
url, key, authority, body = sys.argv[1:]
head = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
request = urllib.request.Request(url + "/v1/completions", body.encode(), head)
tls = ssl.create_default_context(cafile=authority)
print(json.load(urllib.request.urlopen(request, timeout=60, context=tls))["usage"]["completion_tokens"])
"""


class RegionsFleet(HostsFleet):
    """The bed's first host is all of the far region, its second the near one; each has a gateway of its own."""

    def _engine_process(self, like: str, model: str, name: str):  # type: ignore[no-untyped-def]
        far, near = self.bed.hosts
        self.engine_hosts = [far, near, far]
        return super()._engine_process(like, model, name)

    def gateway_process(self, place: int, port: int = 0, admin_port: int = 0) -> Gateway:
        made = super().gateway_process(place, port, admin_port)
        made.process.arguments += ["--policy", f"home={REGIONS[place]}"]
        return made

    def answered(self, place: int, requests: int = 3) -> int:
        """Tokens of a region's clients' answers, asked from inside it."""
        gateway, tokens = self.gateways[place], 0
        for number in range(requests):
            body = json.dumps({"model": MODEL, "prompt": [number + 9, *range(5, 40)], "max_tokens": 4})
            words = [sys.executable, "-c", ASK, gateway.url, self.key, str(self.authority), body]
            tokens += int(subprocess.run(gateway.host.inside(words), check=True, capture_output=True).stdout)
        return tokens

    def routes(self, place: int, kind: str) -> float:
        name = "potluck_routes_total"
        lines = [line for line in self.metrics(place) if line.startswith(name) and f'kind="{kind}"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.fixture
def bed() -> Iterator[Bed]:
    if missing() and os.environ.get("CI"):
        pytest.fail(f"must not be left out here: {missing()}")
    if missing():
        pytest.skip(missing())
    with Bed(2) as made:
        yield made


@pytest.mark.slow
def test_regions_serve_alone_without_their_link_and_offload_again_with_it(bed: Bed, tmp_path: Path) -> None:
    plan, spec = write_plans(tmp_path, UNITS, flows=[("far", "near")])
    gateway = ("--files", f"{MODEL}={WORDS}", "--gateways", "2")
    far, near = range(2)
    with RegionsFleet(bed, plan, spec, gateways=2, gateway=gateway) as fleet:
        assert [fleet.answered(place) for place in (far, near)] == [12, 12]
        assert fleet.routes(near, "remote") == 3, "prompts of near clients are computed far away"
        assert fleet.routes(far, "remote") == 0, "far clients are answered at home"
        bed.cut(bed.hosts[far])
        fleet.until(lambda: fleet.serving(near) == 1)
        assert [fleet.answered(place) for place in (far, near)] == [12, 12]
        assert fleet.routes(near, "remote") == 3
        bed.mend(bed.hosts[far])
        fleet.until(lambda: fleet.serving(near) == fleet.serving(far) == 3)
        assert [fleet.answered(place) for place in (far, near)] == [12, 12]
        assert fleet.routes(near, "remote") == 6, "and again"
        assert fleet.routes(far, "remote") == 0
