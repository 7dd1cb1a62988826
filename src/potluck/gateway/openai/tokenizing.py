"""Text to tokens: short texts at once, long ones in threads, so that nobody's prompt holds up everybody's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from potluck.api.http_errors import HttpRefusal

T = TypeVar("T")

INLINE_CHARS = 500
"""Up to here a text is tokenised at once: it takes less time than handing it to a thread and back."""
MOST_WAITING_CHARS = 64_000_000
"""Of all texts that wait for a thread or are in one; beyond it new ones are turned away."""
THREADS = 2


class TokenizerPool:
    """Threads for what takes long. `then` hears the result or what went wrong, in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, threads: int = THREADS) -> None:
        self._loop, self._threads = loop, threads
        self._pool: ThreadPoolExecutor | None = None
        self.waiting_chars = 0

    def do(self, chars: int, task: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        """Errors of a short task are raised, since it is done before this returns."""
        if chars <= INLINE_CHARS:
            then(task())
            return
        if self.waiting_chars + chars > MOST_WAITING_CHARS:
            raise HttpRefusal(429, "too many long prompts at once; try again", "overloaded")
        self.waiting_chars += chars
        loop = self._loop or asyncio.get_running_loop()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tokens")

        def told(future: Future[T]) -> None:
            self.waiting_chars -= chars
            error = future.exception()
            if error is None:
                then(future.result())
            else:
                then(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))

        def done(future: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(told, future)

        self._pool.submit(task).add_done_callback(done)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
