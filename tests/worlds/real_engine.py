"""A world's engine in a process of its own: `python -m worlds.real_engine LISTEN SEEN FINGERPRINT TOKEN_S`.

It says `ready`, and whatever rule it saw broken; what is wrong with it comes as lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from math import inf
from types import SimpleNamespace
from typing import Any

from worlds.engines import KV, Engine
from worlds.virtual import RUNS, Host


class RealLoop(asyncio.SelectorEventLoop):
    """With what engines, clients and faults of a world ask of its loop."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.began_s = self.time()
        self.chance = random.Random(seed)
        self.processes: dict[int, Any] = {}
        self.sent: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.brought: dict[str, int] = {}
        self.salts: dict[str, str] = {}
        self.replaces_brains = True
        self.broken: list[str] = []
        # Of trouble elsewhere it does not hear, so it takes all times for troubled.
        self.troubles = [SimpleNamespace(where="gw", to_s=inf)]
        self.network: Any = SimpleNamespace(held={})

    @property
    def now_s(self) -> float:
        return self.time() - self.began_s

    def told(self, kind: str, who: str, what: str) -> None:
        if os.environ.get("WORLDS_TELL"):
            sys.stderr.write(f"{self.now_s:10.4f}  {kind:8} {who:16} {what}\n")


def be_engine(listen: str, seen: str, fingerprint: str, token_s: str) -> None:
    class Told(list[str]):
        def append(self, line: str) -> None:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    loop = RealLoop(os.getpid())
    loop.broken = Told()
    run = lambda what, *given: what(*given)  # noqa: E731
    process: Any = SimpleNamespace(host=Host(seen), state=RUNS, run=run)
    asyncio.set_event_loop(loop)
    engine: Any = None

    async def begin() -> None:
        nonlocal engine
        engine = Engine(loop, process, "mixed", fingerprint, float(token_s))  # type: ignore[arg-type]
        loop.add_reader(0, heard)

    def heard() -> None:
        lines = os.read(0, 1 << 16).splitlines()
        if not lines:  # who started it is gone
            os._exit(0)
        for name, value in (item for line in lines for item in json.loads(line).items()):
            setattr(engine, name, tuple(value) if isinstance(value, list) else value)
            if name == "stuck" and not value:
                engine.unstick()

    create_server = loop.create_server

    async def served(factory: Any, host: str, port: int) -> Any:
        result = await create_server(factory, listen, port)
        if port == KV:
            loop.broken.append("ready")
        return result

    loop.create_server = served  # type: ignore[assignment, method-assign]
    loop.run_until_complete(begin())
    loop.run_forever()


if __name__ == "__main__":
    be_engine(*sys.argv[1:])
