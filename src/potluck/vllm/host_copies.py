"""From a device into the host's memory, beside what the device computes.

On a GPU the engine's thread only launches. The stream that computes copies inside the GPU's own memory, into one of a
few slots; another stream brings the slot into a page of pinned memory; a thread moves that into ordinary memory, so
that the page is free for others whether or not somebody fetches it. If all slots are on their way, the stream that
computes waits for the oldest: a slow bus holds steps up, and takes no memory that the engine counts on. If all pages
are, nothing is copied, and what was to be copied stays where it is: pinning another takes longer than ten layers.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_BYTES, SLOTS, PAGES, PORTERS = 1 << 23, 16, 48, 2


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows that are, or will be, in the host's memory."""

    rows: int
    values: Future[Tensor]
    copied: torch.cuda.Event | None
    """When it has come, nothing on the device is needed any more."""


@dataclass(slots=True)
class _Slot:
    room: Tensor
    copied: torch.cuda.Event


class HostCopies:
    """One worker's, for its one device; called in the thread that computes."""

    def __init__(self, device: torch.device) -> None:
        self._slots: deque[_Slot] = deque()
        self._pages: deque[Tensor] = deque()
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            room = torch.empty(SLOTS, PAGE_BYTES, dtype=torch.uint8, device=device)
            self._slots.extend(_Slot(each, torch.cuda.Event()) for each in room)
            self._porters = ThreadPoolExecutor(PORTERS, thread_name_prefix="potluck-kv-host")
            threading.Thread(target=self._pin, name="potluck-kv-pin", daemon=True).start()

    def _pin(self) -> None:
        for _ in range(PAGES):
            self._pages.append(torch.empty(PAGE_BYTES, dtype=torch.uint8, pin_memory=True))

    def room_for(self, size: int) -> bool:
        return not self._slots or len(self._pages) * PAGE_BYTES >= size + PAGE_BYTES

    def copies(self, values: Tensor) -> list[HostRows]:
        """For values that nobody changes, if there is room for them; in parts."""
        if not self._slots:
            there: Future[Tensor] = Future()
            there.set_result(values.cpu())
            return [HostRows(len(values), there, None)]
        rows = max(1, PAGE_BYTES // (values[0].nbytes or 1))
        return [self._copy(part) for part in values.split(rows)]

    def _copy(self, part: Tensor) -> HostRows:
        computing, page, slot = torch.cuda.current_stream(part.device), self._pages.popleft(), self._slots[0]
        self._slots.rotate(-1)
        computing.wait_event(slot.copied)
        lies = slot.room[: part.nbytes]
        lies.view(part.dtype).view(part.shape).copy_(part)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            page[: part.nbytes].copy_(lies, non_blocking=True)
            slot.copied = torch.cuda.Event()
            slot.copied.record(self._stream)
        moved = self._porters.submit(self._move, page, part.dtype, part.shape, slot.copied)
        return HostRows(len(part), moved, slot.copied)

    def _move(self, page: Tensor, dtype: torch.dtype, shape: torch.Size, copied: torch.cuda.Event) -> Tensor:
        values = torch.empty(shape, dtype=dtype)
        try:
            copied.synchronize()
            values.view(-1).view(torch.uint8).copy_(page[: values.nbytes])
        finally:
            self._pages.append(page)
        return values

    def close(self) -> None:
        if self._slots:
            self._porters.shutdown(wait=False, cancel_futures=True)
