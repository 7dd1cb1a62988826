"""How a gateway is set up; the command line makes these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_bytes

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ListenAddresses:
    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    workers: int = 1

    @property
    def unreachable(self) -> bool:
        return self.host in LOOPBACK


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    places: ListenAddresses = ListenAddresses()
    engines: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    """Model to where its tokenizer lies."""
    mock_engines: bool = False
    """Of those only the tokenizer counts: engines act as the models that the spec names."""
    keys: Path | None = None
    usage: Path | None = None
    log: Path | None = None
    tls: tuple[Path, Path] | None = None
    engine_ca: Path | None = None
    """Whose certificates engines show; None: of anybody whom the machine trusts."""
    admin_key: str | None = field(default=None, repr=False)
    engine_key: str = field(default="", repr=False)
    """What engines ask for that a controller tells."""
    secret: bytes = field(default_factory=lambda: token_bytes(32), repr=False)
    why: str = ""
    plan_version: int = 1
    drain_s: float = 30.0
    gateways: int = 1
    """So many share the clients: each grants its part of every key's limits."""
    state: Path | None = None
    """A directory that outlives the gateway: which engines there are, and answers for whoever asks again."""
    takeover: Path | None = None
    """Where a gateway hands its ports to the next one, or gets them from the one before."""

    def answers_in(self, home: Path) -> Path:
        return (self.state or home) / "answers"
