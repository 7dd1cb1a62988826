"""A service as its operators see it: the state file beside what the gateway says, put together as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from potluck.control.control_values import EngineInstance
from potluck.control.controller import STUCK
from potluck.control.gateway_client import GatewayClient
from potluck.control.launchers.process import last_lines
from potluck.control.local_stack import living
from potluck.control.state_store import RecordedEvent, StateStore
from potluck.core.codec import encode
from potluck.core.errors import InputError, PotluckError
from potluck.core.values.kv import lossy_notices

Json = dict[str, Any]
NOTES = 8
LOG_LINES = 5
SHOWN = ("name", "state", "since_s", "url", "replica")  # Of an engine.
EVENT_LOOKBACK = 200  # Happenings in which the reason for something that is missing is looked for.


class ServiceView:
    """A state folder and the gateway that it names. Reads only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = StateStore(folder / "state.db")
        place = self.store.get("gateway") or {}
        self.url = str(place.get("url", ""))
        self.gateway_lives = living(place)
        self.controller_lives = living(self.store.get("controller"))
        self.client = GatewayClient(str(place.get("admin", "")), _key(folder / "admin.key"))

    @property
    def runs(self) -> bool:
        """Whether anything of it lives, be it engines alone that a controller left."""
        return self.gateway_lives or self.controller_lives or any(map(living, self.store.places().values()))

    def snapshot(self) -> tuple[Json, str]:
        """What the gateway says, or why it does not."""
        if not self.gateway_lives:
            return {}, "no gateway runs"
        try:
            return self.client.snapshot(), ""
        except PotluckError as error:
            return {}, str(error)

    def status(self, now_s: float) -> Json:
        snapshot, problem = self.snapshot()
        version = self.store.plan()
        instances = self.store.instances()
        happenings = self.store.happenings(most=EVENT_LOOKBACK)
        wanted = snapshot.get("wanted") or self.store.get("wanted") or {}
        stuck = self.store.get(STUCK) or {} if self.controller_lives else {}
        lacking = self._with_logs(lacking_of(snapshot, wanted, instances, happenings, now_s, stuck))
        given = {item["why"] for item in lacking}
        return {
            "state": str(self.folder),
            "url": self.url,
            "controller": self.controller_lives,
            "gateway": self.gateway_lives and not problem,
            "plan": None
            if version is None
            else {
                "version": version.version,
                "since_s": version.at_s,
                "reason": version.reason,
                "strategy": version.plan.strategy,
                "cost_usd_per_h": version.plan.known_total_usd_per_h,
                "deployments": [encode(deployment) for deployment in version.plan.deployments],
                "notices": [*lossy_notices(version.plan)],
            },
            "scaling": snapshot.get("scaling"),
            "models": snapshot.get("models", {}),
            "replicas": replicas_of(snapshot, wanted, instances),
            "lacking": lacking,
            "open_requests": snapshot.get("open_requests"),
            "engines": [{name: getattr(instance, name) for name in SHOWN} for instance in instances],
            "slowdown": snapshot.get("slowdown"),
            "notices": [line for line in snapshot.get("notices", ()) if line not in given],
            "problems": [item for item in (problem, *snapshot.get("problems", ())) if item],
            "notes": [asdict(happening) for happening in happenings[-NOTES:]],
        }

    def _with_logs(self, lacking: list[Json]) -> list[Json]:
        """Each with the last lines of the engine that failed."""
        logs = self.folder / "logs"
        return [
            {**item, "log": last_lines(logs / f"{item['engine']}.log", LOG_LINES)} if item["engine"] else item
            for item in lacking
        ]

    def close(self) -> None:
        self.store.close()


def _key(path: Path) -> str | None:
    try:
        return path.read_text("utf-8").strip() if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("--state", f"{path} cannot be read, and the gateway asks for it") from error


def replicas_of(snapshot: Json, wanted: Json, instances: Sequence[EngineInstance]) -> list[Json]:
    engines = {instance.replica: instance for instance in instances if instance.replica}
    seen = {item["replica"]: item for item in snapshot.get("replicas", ())}
    names = {item["id"]: item for item in wanted.get("replicas", ())}
    replicas = []
    for name in sorted({*seen, *names}):
        view, want = seen.get(name, {}), names.get(name, {})
        status = view.get("status") or {}
        total = status.get("total_blocks") or 0
        engine = engines.get(name)
        replicas.append(
            {
                "replica": name,
                "model": view.get("model", want.get("model")),
                "region": view.get("region", want.get("region")),
                "role": view.get("role", want.get("role")),
                "by_hand": bool(view.get("by_hand")),
                "state": view.get("state", "unknown"),
                "doubted": bool(view.get("doubted")),
                "cordoned": bool(view.get("cordoned")),
                "engine": view.get("url") if engine is None else engine.name,
                "pace": view.get("pace"),
                "open_requests": view.get("open_requests", 0),
                "running": status.get("running", 0),
                "waiting": status.get("queued", 0),
                "kv_used": 1.0 - status["free_blocks"] / total if total else 0.0,
            }
        )
    return replicas


def lacking_of(
    snapshot: Json,
    wanted: Json,
    instances: Sequence[EngineInstance],
    happenings: Sequence[RecordedEvent],
    now_s: float,
    stuck: Mapping[str, Json],
) -> list[Json]:
    """What is wanted and not there, each with the reason, and with the engine that failed where one did."""
    ready = {item["replica"] for item in snapshot.get("replicas", ()) if item.get("state") == "ready"}
    engines = {instance.replica: instance for instance in instances if instance.replica}
    noted = [item for item in snapshot.get("engines", ()) if item.get("note")]
    notes = {item["url"]: item["note"] for item in noted}
    attached = {item["template"]: item["note"] for item in noted if item.get("template")}
    lacking = []
    for want in wanted.get("replicas", ()):
        name = want["id"]
        if name in ready or want.get("draining"):
            continue
        engine = engines.get(name)
        if engine is None and name in stuck:
            lacking.append({"what": name, "why": _tries(stuck[name], now_s), "engine": stuck[name]["engine"]})
            continue
        if engine is None and want.get("template") in attached:
            lacking.append({"what": name, "why": attached[want["template"]], "engine": None})
            continue
        lacking.append({"what": name, "why": _why(name, engine, notes, happenings, now_s), "engine": None})
    for line in snapshot.get("notes", ()):
        cut = line.find(": ", line.find("@"))  # a template's name may have a colon of its own
        lacking.append({"what": line[:cut], "why": line[cut + 2 :], "engine": None})
    return lacking


def _tries(failed: Json, now_s: float) -> str:
    alike = " in the same way" if failed["alike"] == failed["count"] > 1 else ""
    wait_s = max(0.0, failed["again_s"] - now_s)
    starts = f"{failed['count']} starts" if failed["count"] > 1 else "1 start"
    return f"{starts} failed{alike}: {failed['why']}; the next try in {wait_s:.0f} s"


def _why(
    name: str,
    engine: EngineInstance | None,
    notes: Mapping[str, str],
    happenings: Sequence[RecordedEvent],
    now_s: float,
) -> str:
    if engine is None:
        for happening in reversed(happenings):
            told = happening.kind in ("waits", "failed", "clear", "dead")
            if told and name in f"{happening.what} {happening.why}":
                return f"no engine: {happening.why}"
        return "no engine is there for it"
    if engine.state == "starting":
        return f"{engine.name} is starting, since {max(0.0, now_s - engine.since_s):.0f} s"
    if engine.state == "dead":
        return f"{engine.name} ended: {engine.problem or 'it printed nothing'}"
    return f"{engine.name}: {notes.get(engine.url) or 'is up, but does not serve yet'}"
