"""PYTHONPATH=src:tools python -m accuracy --help"""

import sys

from accuracy.command import study_figures
from potluck.cli.main import run

if __name__ == "__main__":
    sys.exit(run(command=study_figures, name="accuracy"))
