"""What the parts of the world stand on together: the clock's agenda, the replicas that are there, links and books.

The parts know the ground and one another in one direction only; what one of them has to say to the Brain goes through
the callable it was made with.

    ground ◀─ journeys ◀─ yard ◀─ outside, sampler ◀─ world
"""

from __future__ import annotations

from collections.abc import Callable

from potluck.core.state.events import Event
from potluck.core.values.plan import Plan
from potluck.runtime.replica_models import ReplicaModels
from potluck.sim.links.handovers import SimHandovers
from potluck.sim.links.sim_network import SimNetwork
from potluck.sim.load.workload import Workload
from potluck.sim.results.ledger import CostMeter, RequestLedger
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world.event_queue import EventQueue, slices_per_s
from potluck.sim.world.sim_state import SimReplica
from potluck.sim.world.status_reports import StatusReports

Tell = Callable[[float, Event], None]
"""Lets the Brain know what happened when, and does what it asks."""


class CommonState:
    """One run's givens, and what several parts of the world read and change."""

    def __init__(self, replica_models: ReplicaModels, workload: Workload, settings: SimSettings) -> None:
        self.replica_models = replica_models
        self.workload = workload
        self.settings = settings
        self.events = EventQueue(
            slices_per_s(_replicas(replica_models.resolved.plan), workload.rate_per_s or 0.0)
        )
        self.sites: dict[str, SimReplica] = {}
        """Replicas that are there, by id."""
        self.network = SimNetwork(replica_models.resolved, bool(settings.granted))
        self.handovers = SimHandovers(self.events, self.network, settings.overlap)
        self.reports = StatusReports(self.events, self.network, settings)
        self.ledger = RequestLedger(len(workload))
        self.purse = CostMeter()


def _replicas(plan: Plan) -> int:
    each = {template.name: len(template.replicas) for template in plan.templates}
    return sum(deployment.count * each[deployment.template] for deployment in plan.deployments)
