"""A controller in a process of its own, for tests that kill it: `controller_process.py FOLDER GATEWAY_URL`.

Its engines are small servers that only say that they are well.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from potluck.control.control_values import EngineSpec
from potluck.control.controller import Controller
from potluck.control.gateway_client import GatewayClient
from potluck.control.launchers.local_launcher import LocalLauncher
from potluck.control.local_stack import owner_of
from potluck.control.state_store import Lease, StateStore

ENGINE = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    visitor, _ = server.accept()
    visitor.recv(65536)
    visitor.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\nok")
    visitor.close()
"""


@dataclass(frozen=True)
class SmallMaker:
    host: str = "127.0.0.1"
    style: str = "mock"

    def workers(self, engine_spec: EngineSpec) -> int:
        return 1

    def chips_for(self, engine_spec: EngineSpec) -> tuple[str, ...]:
        return ()

    def command(self, engine_spec: EngineSpec, port: int, kv_port: int) -> list[str]:
        return [sys.executable, "-S", "-E", "-c", ENGINE, str(port)]


def main(folder: Path, url: str) -> None:
    store = StateStore(folder / "state.db")
    lease = Lease(store)
    while not lease.inherit():
        time.sleep(0.05)
    launcher = LocalLauncher(SmallMaker(), folder / "logs", owner_of(store))  # type: ignore[arg-type]
    controller = Controller(store, lease, launcher, GatewayClient(url), linger_s=0.2)
    while True:
        controller.turn()
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
