"""Long texts tokenised in a process of its own: the library holds the interpreter's lock for seconds per megabyte.

The child (`tokenizer_child`) is started with the first long text, reads the same tokenizer.json, and ends when its
parent does.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from array import array
from contextlib import suppress
from pathlib import Path

from potluck.api import tokenizer_child
from potluck.api.http import HttpRefusal
from potluck.api.tokenizer_child import COUNT, HEAD, exactly

SLICE_TOKENS = 65_536
"""So many tokens become numbers of Python's at once: other threads run in between."""

TEXT_S = 60.0
"""That one text may take: no sound one takes nearly as long."""

log = logging.getLogger(__name__)


class TokenizerProcess:
    """Used by several threads; one text is tokenised at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    def encode(self, text: str, *, special: bool) -> list[int] | None:
        """The tokens; None where no process can be started. A text that it dies of, or takes too long for, is
        refused: here it would do the same to the server."""
        data = text.encode()
        with self._lock:
            try:
                child = self._started()
            except OSError as error:
                log.warning("no process can be started for long texts: %s", error.strerror or error)
                return None
            timer = threading.Timer(TEXT_S, child.kill)
            timer.start()
            try:
                answer = _answer(child, data, special)
            except (OSError, EOFError, ValueError) as error:
                log.warning("a text of %d bytes could not be tokenised: %s", len(data), error)
                self._child = None
                _end(child)
                raise HttpRefusal(
                    503, "the prompt could not be tokenised; send less", "overloaded"
                ) from error
            finally:
                timer.cancel()
        tokens: list[int] = []
        for start in range(0, len(answer), SLICE_TOKENS):
            tokens.extend(answer[start : start + SLICE_TOKENS])
        return tokens

    def close(self) -> None:
        """End the process, also while a thread waits for its answer."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                _end(child)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise HttpRefusal(503, "the server is shutting down; try again", "shutting_down")
        if self._child is None:
            # -P: its own folder has an `http` that is not Python's.
            command = [sys.executable, "-P", tokenizer_child.__file__, str(self._path)]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._child


def _answer(child: subprocess.Popen[bytes], data: bytes, special: bool) -> array[int]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(HEAD.pack(special, len(data)))
    child.stdin.write(data)
    child.stdin.flush()
    (count,) = COUNT.unpack(exactly(child.stdout, COUNT.size))
    answer = array("I")
    answer.frombytes(exactly(child.stdout, count * answer.itemsize))
    return answer


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):  # What was still to be written cannot be any more.
            if pipe is not None:
                pipe.close()
