"""How many numbers of a chunk are summed together: one figure for `check.py` and for what is compiled for it."""

from __future__ import annotations

ROW = 512
