"""The gateway as the controller sees it: what its Brain wants, and who it is told is there."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from potluck.control.values import Instance, Make, Want
from potluck.core.errors import FormatError, PotluckError
from potluck.core.values.plan import Plan, Template, plan_to_json

ASK_S = 5.0


class GatewayAway(PotluckError):
    """It does not answer; what it wanted last still holds."""


class GatewayClient:
    """Its operators' port."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self._key = url, key

    def wanted(self) -> dict[str, Any]:
        return self._ask("GET", "/wanted")

    def set_fleet(self, instances: Iterable[Instance]) -> None:
        """Those that are up, each with the replica that it is."""
        entries = [
            {"url": each.url, "replica": each.replica, "model": each.make.model, "region": each.make.region}
            for each in instances
            if each.state == "up" and each.replica
        ]
        self._ask("PUT", "/fleet", {"engines": entries})

    def set_plan(self, plan: Plan) -> None:
        self._ask("PUT", "/plan", json.loads(plan_to_json(plan)))

    def snapshot(self) -> dict[str, Any]:
        return self._ask("GET", "/snapshot")

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=ASK_S)
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise GatewayAway(f"the gateway at {self.url} does not answer ({error})") from error
        finally:
            connection.close()
        if answer.status != 200:
            line = " ".join(said[:300].decode("utf-8", "replace").split())
            raise FormatError(f"gateway {method} {path}", f"was answered with {answer.status}: {line}")
        found = json.loads(said)
        if not isinstance(found, dict):
            raise FormatError(f"gateway {method} {path}", "did not answer with an object")
        return found


def wants_of(wanted: Mapping[str, Any], templates: Mapping[str, Template]) -> tuple[Want, ...]:
    """What is wanted, with what each replica is; those of templates that nobody knows are left out."""
    found = []
    for each in wanted.get("replicas", ()):
        template = templates.get(each["template"])
        if template is None:
            continue
        layout = template.replicas[each["index"]].layout
        make = Make(each["model"], layout, each["region"])
        found.append(Want(each["id"], make, each["role"], each["draining"]))
    return tuple(found)
