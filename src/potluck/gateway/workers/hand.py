"""A worker's process: `python -m potluck.gateway.workers.hand SOCKET PLACE`, started by `crew.py`.

It ends when it is told to, and when the desk's process is gone.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from potluck.gateway.collector import calm
from potluck.gateway.door.slates import Slate
from potluck.gateway.http.calls import Calls
from potluck.gateway.http.limits import allow_open_files
from potluck.gateway.workers import remote
from potluck.gateway.workers.mail import Mail
from potluck.gateway.workers.remote import HandMeter, RemoteDirectory, RemoteLine
from potluck.gateway.workers.setup import Setup, setup_of
from potluck.gateway.workers.worker import Worker

FLUSH_S = 0.25
ORPHAN_S = 5.0
"""How long answers may go on when the desk is gone."""


class Hand:
    """What came from the desk, and the worker that it is for."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.directory = RemoteDirectory()
        self.reasons: dict[str, str] = {}
        self.setup: asyncio.Future[Setup] = self._loop.create_future()
        self.ending: asyncio.Future[bool] = self._loop.create_future()
        """True: in order; False: the desk is gone."""
        self.worker: Worker | None = None
        self.meter: HandMeter | None = None
        self.watched = False

    def heard(self, letter: str, text: str) -> None:
        if letter == remote.ACTIONS:
            assert self.worker is not None
            self.worker.rides.act(remote.actions_of(text))
        elif letter == remote.ENDPOINTS:
            self.directory.learn(text)
        elif letter == remote.REASONS:
            self.reasons = json.loads(text)
        elif letter == remote.GONE:
            if self.worker is not None:
                self.worker.rides.gone(json.loads(text))
        elif letter == remote.SETUP:
            self.setup.set_result(setup_of(text))
        elif letter == remote.WATCH:
            self.watched = json.loads(text)
            if self.meter is not None:
                self.meter.watch(self.watched)
        elif letter == remote.CLOSE:
            self._end(True)

    def gone(self) -> None:
        self._end(False)

    def _end(self, told: bool) -> None:
        if not self.ending.done():
            self.ending.set_result(told)
        if not self.setup.done():
            self.setup.cancel()

    def region(self, replica: str) -> str:
        found = self.directory.find(replica)
        return "" if found is None else found.region

    def lacking(self, model: str) -> str:
        return self.reasons.get(model, "")


async def work(path: str, place: int) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: None)  # The desk's process says when to end.
    allow_open_files()
    hand = Hand()
    _, mail = await loop.create_unix_connection(lambda: Mail(hand.heard, hand.gone), path)
    mail.send(remote.HELLO, str(place))
    setup = await hand.setup
    hand.meter = meter = HandMeter(mail, hand.region, usage=setup.usage, spans=setup.spans)
    meter.watch(hand.watched)
    outgoing = Calls()
    settings = setup.settings
    worker = hand.worker = Worker(
        {note.name: note.card() for note in setup.cards},
        hand.directory,
        outgoing,
        meter,
        settings,
        frozenset(setup.classes),
        hand.lacking,
        lambda act: RemoteLine(mail, setup.start_s, act),
        slate=Slate(setup.slate, setup.place, setup.workers),
    )
    flushing = loop.create_task(_flush(meter))
    try:
        mail.send(remote.READY, await worker.listen(settings, shared=True))
        calm()
        in_order = await hand.ending
    finally:
        flushing.cancel()
    await worker.close(setup.drain_s if in_order else min(setup.drain_s, ORPHAN_S))
    meter.flush()
    mail.close()
    await outgoing.close()


async def _flush(meter: HandMeter) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        meter.flush()


def main() -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
