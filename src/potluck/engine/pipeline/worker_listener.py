"""A worker's door: who may come in, and what they are then listened to for.

It begins with nothing but a port. A driver that knows the secret makes a worker of it (`worker.py`) until its
connection ends; workers of the stage before send it states. A worker that `stays` then waits for the next driver.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading

from potluck.core.errors import PotluckError
from potluck.engine.pipeline.pipeline_connection import LinkError, PipelineConnection, TlsPair, welcome
from potluck.engine.pipeline.pipeline_messages import read_states
from potluck.engine.pipeline.stage_inputs import ArrivedStates, StageInputs
from potluck.engine.pipeline.worker import PipelineWorker

DRIVER = "driver"
FIRST_CONTACT_S = 120.0
"""A worker that does not stay gives up when no driver has come by then."""
BUSY_S = 5.0
"""How long a second driver waits for the first one to end before it is turned away."""
MOST_GREETINGS = 32
"""Connections at a time that have not proved anything yet; each is given up after seconds."""


class WorkerListener:
    """Listens; sorts connections into drivers and senders of states."""

    def __init__(self, listener: socket.socket, secret: bytes, tls: TlsPair | None = None) -> None:
        self.drivers: queue.SimpleQueue[PipelineConnection] = queue.SimpleQueue()
        self.inputs = StageInputs()
        """Where states go: those of the driver that is being served."""
        self.free = threading.Semaphore(1)
        """Whether no driver is being served."""
        self._listener, self._secret, self._tls = listener, secret, tls
        self._greeting = threading.Semaphore(MOST_GREETINGS)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                return
            self._greeting.acquire()
            threading.Thread(target=self._greet, args=(sock, str(address[0])), daemon=True).start()

    def _greet(self, sock: socket.socket, peer: str) -> None:
        try:
            link, who = welcome(sock, self._secret, peer, self._tls)
        except LinkError:
            return
        finally:
            self._greeting.release()
        if who == DRIVER:
            if self.free.acquire(timeout=BUSY_S):
                self.drivers.put(link)
            else:
                link.close()
        elif who.isdecimal() and len(who) < 6:
            read_into(self.inputs, link, int(who))
        else:
            link.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def read_into(inputs: StageInputs, link: PipelineConnection, sender: int) -> None:
    """What one worker of the stage before sends, until it ends."""
    number = inputs.join(sender)
    try:
        while True:
            head, body = link.receive()
            states = read_states(head)
            inputs.put(states.step, sender, ArrivedStates(states.dtype, states.rows, body, states.failed))
    except PotluckError as error:
        link.close()
        inputs.lose(sender, f"a worker of the stage before is gone ({error})", number)


def serve(listener: socket.socket, secret: bytes, stay: bool = False, tls: TlsPair | None = None) -> None:
    """Be a worker for one driver, or for one after the other."""
    door = WorkerListener(listener, secret, tls)
    try:
        while True:
            driver = door.drivers.get(timeout=None if stay else FIRST_CONTACT_S)
            door.inputs = StageInputs()
            with contextlib.suppress(LinkError):  # the driver is gone: nobody is left to tell
                PipelineWorker(secret, driver, door.inputs, tls).run()
            door.free.release()
            if not stay:
                return
    except queue.Empty:
        return
    finally:
        door.close()
