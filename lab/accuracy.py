"""Show or recompute the errors of the performance model: python lab/accuracy.py --help"""

from __future__ import annotations

import sys

from accuracy_study.command import study_figures

from potluck.cli.main import run

if __name__ == "__main__":
    sys.exit(run(command=study_figures, name="lab/accuracy.py"))
