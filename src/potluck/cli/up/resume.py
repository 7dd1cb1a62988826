"""`potluck up` after its controller was killed: supervise first, load what plans and starts engines afterwards.

The state has the plan in force, the engines, the gateway's command and what else the killed controller passed to it.
The spec is read, and the planner loaded, only when an engine is to be started or another plan is asked for: in the
background, and after the gateway and the engines are looked after again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from potluck.control.control_values import PlanReply, PlanRequest
from potluck.control.held_sockets import HeldSockets
from potluck.control.launchers.engine_command import DeferredCommands, EngineCommands
from potluck.control.launchers.local_launcher import ForkServer
from potluck.control.local_stack import LocalStack, LocalStackSettings, fork_server_of
from potluck.control.plan_requests import Planner
from potluck.control.state_store import StateStore
from potluck.core.codec import decode, encode
from potluck.core.errors import FormatError, PotluckError
from potluck.core.values.plan import Plan, mark_of

RESUME = "resume"  # The setting with a ResumeRecord; absent where a controller has to read everything anew.
Loaded = tuple[EngineCommands, Planner | None]


@dataclass(frozen=True, slots=True)
class ResumeRecord:
    """What a controller passes to its gateway and launcher that the rest of the state does not have."""

    gateway: tuple[str, ...]
    start_s: float
    why: str
    advise: bool
    host: str
    """Where clients reach the gateway."""


def remember(store: StateStore, settings: LocalStackSettings) -> None:
    """Record what another controller needs to resume this one's work, where it needs nothing from outside."""
    record = ResumeRecord(settings.gateway, settings.start_s, settings.why, settings.advise, settings.host)
    outside = settings.launcher or settings.market or settings.day or settings.profiles
    store.set(RESUME, None if outside else encode(record))


def resumed(
    folder: Path,
    spec: Path,
    style: str,
    port: int | None,
    held: HeldSockets,
    load: Callable[[Plan], Loaded],
) -> LocalStack | None:
    """The service of a controller that was killed; None if its spec has changed or its state is not enough."""
    record, plan = _recorded(folder, spec)
    if record is None or plan is None:
        return None
    deferred = DeferredLoad(lambda: load(plan))
    settings = LocalStackSettings(
        folder,
        spec,
        port,
        DeferredCommands(style, lambda: deferred.loaded()[0]),
        record.gateway,
        record.advise,
        start_s=record.start_s,
        host=record.host,
        held=held,
        why=record.why,
    )

    def later() -> ForkServer | None:
        threading.Thread(target=deferred.load_ahead, name="potluck-load", daemon=True).start()
        return fork_server_of(folder, style)

    return LocalStack(settings, None, deferred, later=later)


def _recorded(folder: Path, spec: Path) -> tuple[ResumeRecord | None, Plan | None]:
    if not (folder / "state.db").is_file() or not spec.is_file():
        return None, None
    store = StateStore(folder / "state.db")
    try:
        value, newest = store.get(RESUME), store.plan()
        if value is None or newest is None or store.get("spec") != mark_of(spec.read_text("utf-8")):
            return None, None
        return decode(ResumeRecord, value), newest.plan
    except FormatError:  # another release's
        return None, None
    finally:
        store.close()


class DeferredLoad:
    """A Planner, and commands for engines, that are loaded once, by the first thread that needs one of them."""

    def __init__(self, load: Callable[[], Loaded]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._loaded: Loaded | None = None

    def loaded(self) -> Loaded:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def load_ahead(self) -> None:
        """Load before anything needs it; what fails is tried again, and reported, by what needs it."""
        with suppress(PotluckError, OSError):
            self.loaded()

    def first(self, plan_request: PlanRequest) -> PlanReply:
        planner = self.loaded()[1]
        return PlanReply(None, "scaling is `none`") if planner is None else planner.first(plan_request)

    def full(self, plan_request: PlanRequest) -> PlanReply:
        planner = self.loaded()[1]
        return PlanReply(None, "scaling is `none`") if planner is None else planner.full(plan_request)
