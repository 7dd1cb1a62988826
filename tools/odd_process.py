"""Potluck's commands as another release, or a machine whose clock is wrong, would run them; for tests and benchmarks.

python tools/odd_process.py '{"kv_version": 1, "version": "0.0.9", "clock_s": -86400}' engine serve ...
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    odd = json.loads(sys.argv.pop(1))
    shift_s, true = float(odd.get("clock_s", 0.0)), time.time
    if shift_s:
        time.time = lambda: true() + shift_s
    import potluck
    from potluck.kv import frames

    potluck.__version__ = odd.get("version", potluck.__version__)
    frames.VERSION = odd.get("kv_version", frames.VERSION)
    from potluck.cli.main import main as potluck_main

    potluck_main()


if __name__ == "__main__":
    main()
