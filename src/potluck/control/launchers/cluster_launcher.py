"""What launchers on clusters share (Ray, Kubernetes): silent nodes and news of nodes.

A cluster notices a dead node late. So engines are asked themselves at every look; the node of one that fell silent
gets nothing for a while, until the cluster itself has noticed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from potluck.control.control_values import NodeNews
from potluck.control.launchers.engine_command import EngineCommands
from potluck.control.market import NodeTypeLabels, Spellings
from potluck.core.errors import CapacityError
from potluck.core.values.layout import StageNode


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    maker: EngineCommands
    spellings: Spellings
    key: str = ""  # API key of engines.


class ClusterLauncher:
    """`owner` is the controller's mark, the same after a restart. Used from one thread."""

    def __init__(
        self, options: ClusterOptions, folder: Path, owner: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._maker, self._spellings, self._key = options.maker, options.spellings, options.key
        self._folder, self._clock = folder, clock
        self._mark = hashlib.sha256(owner.encode()).hexdigest()[:16]
        self._silent: dict[str, float] = {}  # Nodes that we hold for dead, and since when.
        self._news: list[NodeNews] = []

    def log_of(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def news(self) -> tuple[NodeNews, ...]:
        node_news, self._news = tuple(self._news), []
        return node_news

    def _spelling(self, node: StageNode) -> NodeTypeLabels:
        if node.node not in self._spellings:
            raise CapacityError(f"{node.node} is not in the spec that this service was started with")
        return self._spellings[node.node]

    def _silence(self, node: str, shown: str, why: str, now_s: float) -> None:
        """Nothing is started on a node from now on, for a while."""
        if node not in self._silent:
            self._silent[node] = now_s
            self._news.append(NodeNews("gone", shown, why))

    def _keep_log(self, name: str, written: bytes, *, anew: bool = False) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.log_of(name).open("wb" if anew else "ab") as file:
            file.write(written)


def node_changes(
    before: Collection[str], now: Collection[str], gone: str, text: str, short: int | None = None
) -> Iterator[NodeNews]:
    """Nodes that left or joined; `short`: letters of a name that are shown."""
    for name in sorted(set(before) - set(now)):
        yield NodeNews("gone", name[:short], gone)
    for name in sorted(set(now) - set(before)):
        yield NodeNews("came", name[:short], text)
