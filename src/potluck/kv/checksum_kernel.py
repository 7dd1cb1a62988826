"""The compiled loops of `checksum.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from potluck.kv.chunks import CHECKSUM_ROW as ROW
from potluck.native.machine_code import Function, compiled

Words = npt.NDArray[np.uint64]
_recv: Any = types.ExternalFunction("recv", types.intp(types.int32, types.uintp, types.uintp, types.int32))


def _compiled(signature: str) -> Callable[[Function], Function]:
    return lambda function: compiled(function, signature, arrays=True)


@_compiled("Tuple((uint64,uint64))(Array(uint64,1,'C',readonly=True),Array(uint64,1,'C'),int64,int64)")
def rows(words: Words, columns: Words, first: int, last: int) -> Any:
    """A, and what rows add to B; columns are added up for `rest`."""
    a = b = np.uint64(0)
    for i in range(first, last):
        row = words[i * ROW : (i + 1) * ROW]
        total = np.uint64(0)
        for j in range(ROW):
            x = row[j]
            total += x
            columns[j] += x
        a += total
        b += total * np.uint64(i * ROW)
    return a, b


@_compiled(
    "Tuple((uint64,uint64))(Array(uint64,1,'C',readonly=True),Array(uint64,1,'C'),Array(uint64,1,'C'),int64)"
)
def copied(words: Words, to: Words, columns: Words, count: int) -> Any:
    """As `rows` for the first ones, of what is copied, each number as it was read: others may write there."""
    a = b = np.uint64(0)
    for i in range(count):
        row, out = words[i * ROW : (i + 1) * ROW], to[i * ROW : (i + 1) * ROW]
        total = np.uint64(0)
        for j in range(ROW):
            x = row[j]
            out[j] = x
            total += x
            columns[j] += x
        a += total
        b += total * np.uint64(i * ROW)
    return a, b


@_compiled("Tuple((uint64,uint64))(Array(uint64,1,'C',readonly=True),Array(uint64,1,'C'))")
def rest(words: Words, columns: Words) -> Any:
    """What columns, and the numbers behind the last whole row, add to A and B."""
    a = b = np.uint64(0)
    for j in range(ROW):
        b += columns[j] * np.uint64(j + 1)
    for p in range(words.shape[0] // ROW * ROW, words.shape[0]):
        a += words[p]
        b += words[p] * np.uint64(p + 1)
    return a, b


@_compiled("int64(int32,Array(uint64,1,'C'),Array(uint64,1,'C'),int64,int32)")
def receive(fd: int, words: Words, columns: Words, read_bytes: int, flags: int) -> Any:
    """How many bytes came; the sums of whole rows are left behind the columns."""
    whole, address = words.shape[0] * 8, words.ctypes.data
    got = done = 0
    while got < whole:
        recv = _recv(fd, address + got, min(read_bytes, whole - got), flags)
        if recv <= 0:
            break
        got += recv
        a, b = rows(words, columns, done, got // (8 * ROW))
        columns[ROW] += a
        columns[ROW + 1] += b
        done = got // (8 * ROW)
    return got
