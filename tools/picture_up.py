"""A picture of `potluck up` in a terminal, from a real run: docs/up.svg.

    PYTHONPATH=src python tools/picture_up.py [--out docs/up.svg]

Starts the demo, runs the curl line that it prints, sends some load, looks at `potluck top`, and stops it.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 80
READY_S, END_S = 300.0, 120.0
LOAD = ("--rate", "3", "--seconds", "14", "--input", "300", "--output", "40")
POTLUCK = (sys.executable, "-m", "potluck.cli.main")


def printed(process: subprocess.Popen[str]) -> list[str]:
    """What it says until it can be asked."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if "max_tokens" in line:
            return lines
    raise SystemExit("it did not become ready:\n" + "\n".join(lines))


def answer(curl: str) -> str:
    """What the curl line streams, as one text."""
    done = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=120)
    pieces = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
    return "".join(
        str(piece["choices"][0]["delta"].get("content") or "") for piece in pieces if piece["choices"]
    )


def run(state: str) -> list[tuple[str, list[str]]]:
    """(command, what it printed), in turn."""
    up = [*POTLUCK, "up", "--state", state]
    process = subprocess.Popen(up, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watchdog = threading.Timer(READY_S, process.kill)
    watchdog.start()
    try:
        lines = printed(process)
        watchdog.cancel()
        at = next(place for place, line in enumerate(lines) if "curl" in line)
        message = answer("\n".join(lines[at:]))
        load = subprocess.Popen([*POTLUCK, "bench", *LOAD], stdout=subprocess.DEVNULL)
        top = [*POTLUCK, "top", "--once", "--every", "8", "--state", state]
        seen = subprocess.run(top, capture_output=True, text=True, timeout=120).stdout
        load.wait(120)
        return [
            ("make up", lines),
            ("curl -N ...   # the line above; its stream, put together", [message]),
            ("potluck top", seen.splitlines()),
        ]
    finally:
        watchdog.cancel()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        finally:
            process.kill()


def drawn(parts: list[tuple[str, list[str]]]) -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    for command, lines in parts:
        console.print(Text(f"$ {command}", style="bold green"))
        for line in lines:
            console.print(Text(line.rstrip(), overflow="fold"))
        console.print()
    picture = console.export_svg(title="potluck")
    # It must not fetch anything: whoever looks has a font.
    picture = re.sub(r"@font-face\s*\{.*?\}\s*", "", picture, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/up.svg"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given.out.write_text(drawn(run(folder)), "utf-8")
    print(f"{given.out}: {given.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
