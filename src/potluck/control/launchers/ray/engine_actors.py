"""The actors of one engine: one, or for a pipeline over several nodes one for each of its workers beside it.

Actors are detached, so they outlive the controller, and have names, so a successor finds them. Those of a pipeline
are in one placement group: all of its nodes are had, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from potluck.control.launchers.ray.process_actor import Errand, ProcessActor, Report
from potluck.control.launchers.ray.ray_nodes import LITTLE, NodeRequest

START_REPORT: Report = {
    "state": "starting",
    "address": "",
    "problem": "",
    "node": "",
    "log": b"",
    "log_at": 0,
}


@dataclass(slots=True)
class EngineActor:
    """One actor as it was last heard; `EngineActors.hear` is its one mutator."""

    name: str
    handle: Any = None
    asked: Any = None
    """What it was asked and has not answered yet."""
    heard_s: float | None = None
    """When it last answered."""
    said: Report = field(default_factory=lambda: dict(START_REPORT))
    cut_off: bool = False
    """Whether it could not be reached when it was last asked."""
    gone: str = ""
    """Why it is no more."""


class EngineActors:
    """All that is known of one engine's actors. `names` has the workers first, the engine's own last."""

    def __init__(self, ray: Any, space: str, name: str, count: int, now_s: float) -> None:
        self._ray, self._space, self.name = ray, space, name
        workers = [f"{name}/{number}" for number in range(count)]
        self.members = [EngineActor(each) for each in (*workers, name)]
        self.began = False
        """Whether the engine itself was told to start."""
        self.since_s = now_s
        self.stopped_s: float | None = None

    @property
    def workers(self) -> list[EngineActor]:
        return self.members[:-1]

    @property
    def lead(self) -> EngineActor:
        return self.members[-1]

    def create(
        self,
        asks: Sequence[NodeRequest],
        errand: Errand,
        environment: Mapping[str, str],
        secret: str,
        python: str,
        authority: str = "",
    ) -> None:
        """Ask Ray for them; it places them when it can."""
        actor = self._ray.remote(ProcessActor)
        common = {"namespace": self._space, "lifetime": "detached", "max_restarts": 0, "num_cpus": 0}
        if len(asks) == 1:
            only = asks[0]
            self.lead.handle = actor.options(
                name=self.name,
                num_gpus=only.gpus,
                resources=dict(only.resources),
                label_selector=dict(only.labels),
                **common,
            ).remote(self.name, "engine", environment, secret, python, None, authority)
            return
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group(
            # The engine itself needs a sliver of the first one's bundle, else Ray may put it anywhere.
            [{**ask.bundle, "CPU": LITTLE} for ask in asks],
            strategy="PACK",
            name=self._group,
            lifetime="detached",
            bundle_label_selector=[dict(ask.labels) for ask in asks],
        )

        def at(place: int) -> Any:
            return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)

        for place, (ask, member) in enumerate(zip(asks, self.workers, strict=True)):
            member.handle = actor.options(
                name=member.name,
                num_gpus=ask.gpus,
                resources=dict(ask.resources),
                scheduling_strategy=at(place),
                **common,
            ).remote(member.name, errand, environment, secret, python)
        common["num_cpus"] = LITTLE
        self.lead.handle = actor.options(name=self.name, scheduling_strategy=at(0), **common).remote(
            self.name, "engine", environment, secret, python, None, authority
        )

    @property
    def _group(self) -> str:
        return f"{self._space}-{self.name}"

    def ask(self) -> list[Any]:
        """Ask all who owe no answer; what is awaited."""
        for member in self.members:
            if member.asked is None and self._found(member):
                member.asked = member.handle.report.remote(member.said["log_at"])
        return [member.asked for member in self.members if member.asked is not None]

    def _found(self, member: EngineActor) -> bool:
        """Whether it can be asked: one that another controller started is looked up by its name."""
        if member.handle is None and not member.gone:
            try:
                member.handle = self._ray.get_actor(member.name, self._space)
            except ValueError:
                member.gone = "is not there any more"
        return not member.gone

    def hear(self, ready: set[Any], now_s: float) -> bytes:
        """Take the answers that have come; what was written since the last."""
        written = b""
        for member in self.members:
            if member.asked is None or member.asked not in ready:
                continue
            try:
                member.said = self._ray.get(member.asked)
                member.heard_s, member.cut_off = now_s, False
                written += member.said["log"]
            except self._ray.exceptions.ActorUnavailableError:
                member.cut_off = True
            except self._ray.exceptions.RayError as error:
                member.gone = _line(error)
            member.asked = None
        return written

    def tell(self, member: EngineActor, method: str, *values: object) -> None:
        """Ask for something without waiting for it."""
        if self._found(member):
            getattr(member.handle, method).remote(*values)

    def end(self) -> None:
        """Take all of it off the cluster, also what does not answer."""
        for member in self.members:
            with suppress(ValueError, self._ray.exceptions.RayError):
                handle = member.handle or self._ray.get_actor(member.name, self._space)
                if member.heard_s is not None and member.asked is None and not member.gone:
                    handle.forget.remote()
                    handle.__ray_terminate__.remote()
                else:
                    self._ray.kill(handle)
        if self.workers:
            from ray.util import get_placement_group, remove_placement_group

            with suppress(ValueError, self._ray.exceptions.RayError):
                remove_placement_group(get_placement_group(self._group))


def _line(error: BaseException) -> str:
    """The one line of what Ray says that tells why."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "died because" in line or "node" in line.lower()]
    return (telling or lines or [type(error).__name__])[0][:200]
