"""`python -m demo`, which `make demo` calls."""

import sys

from demo.command import demo
from potluck.cli.main import run

sys.exit(run(command=demo, name="demo"))
