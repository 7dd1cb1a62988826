"""Run the papers' experiments, published figures beside ours: python lab/reproduce.py --help"""

from __future__ import annotations

import sys

from papers.command import reproduce

from potluck.cli.main import run

if __name__ == "__main__":
    sys.exit(run(command=reproduce, name="lab/reproduce.py"))
