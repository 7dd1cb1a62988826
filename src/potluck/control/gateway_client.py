"""The gateway as the controller sees it: what its Brain wants, and who it is told is there."""

from __future__ import annotations

import json
import ssl
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, NoReturn
from urllib.parse import quote, urlencode

from potluck.control.control_values import EngineInstance, EngineSpec, WantedReplica
from potluck.control.http_client import HttpAnswer, HttpClient
from potluck.core.codec import encode
from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.core.values.plan import Plan, Template, plan_to_json
from potluck.core.values.types import Region

REQUEST_TIMEOUT_S = 5.0  # The event stream of a gateway has a line at least every 15 s.
MAX_LINE_BYTES = 1_000_000
MAX_REASON_CHARS = 400


class GatewayAway(PotluckError):
    """It does not answer; what it wanted last still holds."""


class KeyRefused(InputError):
    """It has another operators' key, or none: to ask again is in vain."""


class GatewayClient:
    def __init__(self, url: str, key: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._key = key
        self._http = HttpClient(url, lambda: key, tls, self._away)

    @property
    def url(self) -> str:
        return self._http.url

    @url.setter
    def url(self, url: str) -> None:
        self._http.url = url

    def _away(self, error: Exception) -> GatewayAway:
        return GatewayAway(f"the gateway at {self.url} does not answer ({error})")

    def wanted(self) -> dict[str, Any]:
        return self._ask("GET", "/wanted")

    def set_fleet(self, instances: Iterable[EngineInstance]) -> None:
        entries = [
            {"url": one.url, "replica": one.replica, "model": one.make.model, "region": one.make.region}
            for one in instances
            if one.state == "up" and one.replica
        ]
        self._ask("PUT", "/fleet", {"engines": entries})

    def set_plan(self, plan: Plan, why: str = "", version: int = 0) -> None:
        """Another plan and why; with its number in the state, so that it has the same one everywhere."""
        words = urlencode({"why": why[:MAX_REASON_CHARS], "version": version}, quote_via=quote)
        self._ask("PUT", f"/plan?{words}", json.loads(plan_to_json(plan)))

    def set_market(self, regions: Iterable[Region]) -> None:
        self._ask("PUT", "/market", {"regions": [encode(region) for region in regions]})

    def decisions(self, after: int) -> dict[str, Any]:
        return self._ask("GET", f"/decisions?after={after}")

    def snapshot(self) -> dict[str, Any]:
        return self._ask("GET", "/snapshot")

    def drain(self, replica: str) -> dict[str, Any]:
        return self._ask("POST", "/drain", {"replica": replica})

    def cordon(self, name: str, *, node: bool, lift: bool = False) -> dict[str, Any]:
        """Nothing new for a replica or a machine's replicas; or again."""
        return self._ask("POST", "/uncordon" if lift else "/cordon", {"node" if node else "replica": name})

    def cordon_again(self, marks: Iterable[str]) -> None:
        """What a gateway before it was told."""
        self._ask("POST", "/cordon", {"marks": sorted(marks)})

    def note(self, what: str, why: str, kind: str = "note") -> None:
        self._ask("POST", "/note", {"what": what, "why": why, "kind": kind})

    def kill(self, replica: str) -> dict[str, Any]:
        return self._ask("POST", "/kill", {"replica": replica})

    def flip(self, replica: str, role: str) -> dict[str, Any]:
        return self._ask("POST", "/flip", {"replica": replica, "role": role})

    def metrics(self) -> str:
        return self._said("GET", "/metrics").decode("utf-8", "replace")

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            document = json.loads(self._said(method, path, body))
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise FormatError(f"gateway {method} {path}", "did not answer with an object")
        return document

    def _said(self, method: str, path: str, body: object = None) -> bytes:
        with self._call(method, path, body, REQUEST_TIMEOUT_S) as answer:
            return answer.read()

    @contextmanager
    def _call(self, method: str, path: str, body: object, timeout_s: float) -> Iterator[HttpAnswer]:
        with self._http.call(method, path, timeout_s, body) as answer:
            if answer.status != 200:
                self._refuse(f"gateway {method} {path}", answer)
            yield answer

    def _refuse(self, what: str, answer: HttpAnswer) -> NoReturn:
        received = answer.read(MAX_LINE_BYTES)
        if answer.status == 401:
            wrong = "is needed" if self._key is None else "is not the one"
            raise KeyRefused("--key-file", f"{wrong}: the gateway at {self.url} asks for the operators' key")
        if answer.status in (400, 403, 404, 422) and (line := _message(received)):
            raise KeyRefused("", line) if answer.status == 403 else InputError("", line)
        text = " ".join(received[:300].decode("utf-8", "replace").split())
        raise FormatError(what, f"was answered with {answer.status}: {text}")


def _message(said: bytes) -> str:
    try:
        return " ".join(str(json.loads(said)["error"]["message"]).split())
    except (ValueError, KeyError, TypeError):
        return ""


def wants_of(wanted: Mapping[str, Any], templates: Mapping[str, Template]) -> tuple[WantedReplica, ...]:
    """What is wanted, with what each replica is; those of unknown templates are left out."""
    wanted_replicas = []
    for item in wanted.get("replicas", ()):
        template = templates.get(item["template"])
        if template is None:
            continue
        layout = template.replicas[item["index"]].layout
        engine_spec = EngineSpec(item["model"], layout, item["region"], item.get("step_tokens", 0))
        wanted_replicas.append(WantedReplica(item["id"], engine_spec, item["role"], item["draining"]))
    return tuple(wanted_replicas)


Labels = tuple[tuple[str, str], ...]
WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class MetricsReading:
    at_s: float
    values: Mapping[tuple[str, Labels], float]

    def of(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        for (known, labels), value in self.values.items():
            if known == name:
                yield dict(labels), value

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for own, value in self.of(name) if labels.items() <= own.items())


def read(text: str, at_s: float) -> MetricsReading:
    from prometheus_client.parser import text_string_to_metric_families

    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return MetricsReading(at_s, values)


class RecentMetrics:
    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: deque[MetricsReading] = deque()

    def add(self, reading: MetricsReading) -> None:
        self._readings.append(reading)
        while len(self._readings) > 2 and self._readings[1].at_s <= reading.at_s - self._window_s:
            self._readings.popleft()

    @property
    def now(self) -> MetricsReading:
        return self._readings[-1]

    @property
    def span_s(self) -> float:
        return self.now.at_s - self._readings[0].at_s

    def grown(self, name: str, **labels: str) -> float:
        before, now = self._readings[0].sum(name, **labels), self.now.sum(name, **labels)
        return now - before if now >= before else now

    def per_s(self, name: str, **labels: str) -> float:
        return self.grown(name, **labels) / self.span_s if self.span_s > 0 else 0.0

    def quantile(self, name: str, share: float, **labels: str) -> float | None:
        """Of a histogram's values in the window, by straight lines between its bounds; None when there are none."""
        bounds = {
            float(own["le"]): self.grown(f"{name}_bucket", **{**labels, "le": own["le"]})
            for own, _ in self.now.of(f"{name}_bucket")
            if labels.items() <= own.items()
        }
        ranked = sorted(bounds.items())
        if not ranked or ranked[-1][1] <= 0:
            return None
        wanted = share * ranked[-1][1]
        low, below = 0.0, 0.0
        for bound, count in ranked:
            if count >= wanted:
                if bound == inf:
                    return low
                return low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
            low, below = bound, count
        return low
