"""Packaging is described in pyproject.toml. This adds a choice: POTLUCK_COMPILE=1 compiles the hot code with mypyc.

Compiled are the decisions of a request and the simulator's world, the very files that run interpreted otherwise: the
same results, more than twice as fast. Modules of plain values stay as they are, since nothing would be gained, and
since their annotations are read at run time. See docs/decisions/0007-compiled.md.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from setuptools import setup

COMPILED = {
    "core/admission": "admission queue",
    "core/brain": "brain prefix_caches recovery requests",
    "core/replica": "batch spare_cache",
    "core/routing": "balance capacity deadlines isolation learned_speeds link_states opportunistic prefix_affinity "
    "prefix_index round_robin router routing_table split template_weights thresholds",
    "core/state": "fleet request_state targets",
    "sim/links": "handovers link sim_network",
    "sim": "sim_engine step_table",
    "sim/results": "ledger",
    "sim/world": "attempts common_state event_queue sim_state world",
}


ONE_ROUNDING_EACH = "/fp:precise" if sys.platform == "win32" else "-ffp-contract=off"
"""A product and a sum are rounded one by one, as Python does it. Where processors have one instruction for both (all
64-bit ARM), compilers take it unless they are told not to, and times differ in the last bit."""


WITHIN = ["-fno-semantic-interposition", "-fvisibility=hidden", "-fno-plt"] if sys.platform == "linux" else []
"""Functions of a shared library can be replaced from outside, unless it says otherwise; so none would be inlined."""


def extensions() -> list[Any]:
    from mypyc.build import mypycify

    paths = [
        f"src/potluck/{folder}/{name}.py" for folder, names in COMPILED.items() for name in names.split()
    ]
    os.environ["MYPYPATH"] = "src"
    options = [
        "--config-file",
        os.devnull,
        "--strict",
        "--explicit-package-bases",
        "--ignore-missing-imports",
    ]
    found = mypycify([*options, *paths], opt_level="3", debug_level="0", group_name="potluck")
    for extension in found:
        # Not added in place: all of them share one list.
        extension.extra_compile_args = [*extension.extra_compile_args, ONE_ROUNDING_EACH, *WITHIN]
    return found


setup(ext_modules=extensions() if os.environ.get("POTLUCK_COMPILE") == "1" else [])
