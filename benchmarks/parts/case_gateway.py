"""`potluck`, told how the case study's engines are set up: that they compute one prompt at a time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from parts.case_study import as_set_up
from potluck.cli.main import run
from potluck.cli.simulating import simulation

scene_of = simulation.scene_of
simulation.scene_of = lambda inputs: as_set_up(scene_of(inputs))
raise SystemExit(run(sys.argv[1:]))
