"""What the parts of the world stand on together: the clock's agenda, the replicas that are there, links and books.

The parts know the ground and one another in one direction only; what one of them has to say to the Brain goes through
the callable it was made with.

    ground ◀─ journeys ◀─ yard ◀─ outside, sampler ◀─ world
"""

from __future__ import annotations

from collections.abc import Callable

from potluck.core.brain.events import Event
from potluck.core.values.plan import Plan
from potluck.sim.links.handover import Handovers
from potluck.sim.links.network import Network
from potluck.sim.load.workload import Workload
from potluck.sim.results.ledger import Ledger, Purse
from potluck.sim.settings import Settings
from potluck.sim.world.agenda import Agenda, slices_per_s
from potluck.sim.world.reports import Reports
from potluck.sim.world.state import Site
from potluck.worlds.kits import Kits

Tell = Callable[[float, Event], None]
"""Lets the Brain know what happened when, and does what it asks."""


class Ground:
    """One run's givens, and what several parts of the world read and change."""

    def __init__(self, kits: Kits, workload: Workload, settings: Settings) -> None:
        self.kits = kits
        self.workload = workload
        self.settings = settings
        self.agenda = Agenda(slices_per_s(_replicas(kits.scene.plan), workload.rate_per_s or 0.0))
        self.sites: dict[str, Site] = {}
        """Replicas that are there, by id."""
        self.network = Network(kits.scene, bool(settings.granted))
        self.handovers = Handovers(self.agenda, self.network, settings.overlap)
        self.reports = Reports(self.agenda, self.network, settings)
        self.ledger = Ledger(len(workload))
        self.purse = Purse()


def _replicas(plan: Plan) -> int:
    each = {template.name: len(template.replicas) for template in plan.templates}
    return sum(deployment.count * each[deployment.template] for deployment in plan.deployments)
