"""Exit codes, the same for every command."""

from __future__ import annotations

import sys
from typing import NoReturn

DONE, NO, BAD_INPUT, MISSED, BUG, INTERRUPTED = 0, 1, 2, 3, 70, 130
MEANINGS = (
    (DONE, "done"),
    (
        NO,
        "no (`replay`: a difference; `simulate`: a replica that the plan counts on got nothing), or broken pipe",
    ),
    (BAD_INPUT, "bad input, or nothing can serve it: one line names the field and the fix"),
    (
        MISSED,
        "done, but a promise is not kept (`simulate`, `plan`, `bench --slo`): an objective is missed, or some "
        "demand not met",
    ),
    (BUG, "a bug of ours (POTLUCK_DEBUG=1 shows the traceback)"),
    (INTERRUPTED, "interrupted"),
)


def missed() -> NoReturn:
    """Everything was printed; the exit code says that a promise is not kept."""
    sys.stdout.flush()
    sys.exit(MISSED)
