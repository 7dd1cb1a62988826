"""The GPUs of this machine, as their driver names them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from potluck.core.errors import CapacityError

ASK = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
ASK_S = 30.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Card:
    index: int
    uuid: str
    """The same whatever the order in which cards are counted."""
    name: str
    memory_bytes: int


def find_cards(environment: Mapping[str, str] | None = None) -> tuple[Card, ...]:
    """All that may be used here; none where there is no driver."""
    variables = os.environ if environment is None else environment
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=ASK_S, env=dict(variables))
    except FileNotFoundError:
        return ()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CapacityError(f"nvidia-smi does not answer ({error}); is the driver well?") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        raise CapacityError(f"nvidia-smi failed with {done.returncode}: {said or 'it said nothing'}")
    found = tuple(_card(line) for line in done.stdout.splitlines() if line.strip())
    return _visible(found, variables.get(VISIBLE))


def _card(line: str) -> Card:
    parts = [part.strip() for part in line.split(",")]
    try:
        index, uuid, name, mib = parts
        return Card(int(index), uuid, name, int(float(mib)) * 1024 * 1024)
    except ValueError as error:
        raise CapacityError(f"nvidia-smi said {line!r}, which is not index, uuid, name, MiB") from error


def _visible(cards: tuple[Card, ...], said: str | None) -> tuple[Card, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, by index or by the beginning of a uuid; all where it says nothing."""
    if said is None:
        return cards
    wanted = [part.strip() for part in said.split(",") if part.strip()]
    return tuple(
        card
        for part in wanted
        for card in cards
        if (part == str(card.index) if part.isdecimal() else card.uuid.startswith(part))
    )
