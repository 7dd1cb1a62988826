"""What a worker's process must know before it can begin; crosses as one line of JSON."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from potluck.core.codec import decode, encode
from potluck.core.values.service import PrefixSharing
from potluck.gateway.openai.model_card import ModelCard, read_card
from potluck.gateway.settings import GatewaySettings, ListenAddresses


@dataclass(frozen=True, slots=True)
class ModelCardNote:
    """A model; what its files say is read where it is needed."""

    name: str
    context_tokens: int
    vocab: int
    plain: bool
    folder: str | None
    """Where its tokenizer lies."""
    pretended: bool = False
    """Engines act as a larger model than the files are of, and answer as long requests as that would."""

    def card(self) -> ModelCard:
        created_s = int(time.time())
        if self.folder is not None:
            context = self.context_tokens if self.pretended else 0
            return read_card(
                self.name, self.folder, context_tokens=context, plain=self.plain, created_s=created_s
            )
        return ModelCard(
            self.name, self.context_tokens, plain=self.plain, vocab=self.vocab, created_s=created_s
        )


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    place: int
    """Which of the workers it is."""
    workers: int
    host: str
    port: int
    cards: tuple[ModelCardNote, ...]
    classes: tuple[str, ...]
    sharing: tuple[PrefixSharing, ...]
    keys: str | None
    certificate: str | None
    key: str | None
    engine_ca: str | None
    secret: str
    """From which tenants' salts are made; the same for all."""
    shared_use: str
    start_s: float
    """When the desk's time began, by the monotonic clock."""
    drain_s: float
    gateways: int
    spans: bool
    usage: str | None = None
    """Where records of use are written."""
    answers: str | None = None
    """Where answers lie for whoever asks again."""

    def text(self) -> str:
        return json.dumps(encode(self))

    @property
    def settings(self) -> GatewaySettings:
        tls = None
        if self.certificate is not None and self.key is not None:
            tls = (Path(self.certificate), Path(self.key))
        keys = None if self.keys is None else Path(self.keys)
        secret = bytes.fromhex(self.secret)
        engine_ca = None if self.engine_ca is None else Path(self.engine_ca)
        return GatewaySettings(
            ListenAddresses(self.host, self.port),
            keys=keys,
            tls=tls,
            engine_ca=engine_ca,
            secret=secret,
            drain_s=self.drain_s,
            gateways=self.gateways,
        )


def setup_of(text: str) -> WorkerSetup:
    return decode(WorkerSetup, json.loads(text), "setup")
