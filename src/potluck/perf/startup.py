"""How long a replica takes to start, and to stop.

    start = provision a node + container and runtime + weights per node / bandwidth + engine initialisation

The papers print sums, not parts. The defaults are the round numbers that meet both printed sums at once, so
each part alone is a guess and everything is "assumed" until a fleet's own figures are put in:

    CAUCHY 3.5           90 s until a new instance works (8B-class: 16 GB); 30 s for a graceful end
    THUNDERSERVE table 4 103 +- 10 s to reload LLaMA-30B (65 GB) on nodes that run; a role flip reloads
                         nothing, its 13 +- 2 s being the search for the new plan
    CORAL 5.1            several minutes, dominated by node start-up, weights and graph compilation;
                         draining takes roughly a minute
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from potluck.core.values.plan import Confidence


@dataclass(frozen=True, slots=True)
class StartupCosts:
    """What starting costs in one fleet."""

    provision_s: float = 40.0
    """From asking for a node until it runs."""
    container_s: float = 15.0
    """Image, container, imports, device context, network connections."""
    load_gb_per_s: float = 0.75
    """What one node reads weights at, from disk or network: 65 GB in the better part of 103 s."""
    pcie_gb_per_s: float = 25.0
    """Cap on the above, however fast the disk: four fifths of the 31.5 GB/s of one PCIe 4.0 x16 slot."""
    engine_init_s: float = 15.0
    """Memory profiling, graph capture, warm-up."""
    drain_s: float = 30.0
    """Graceful end: requests under way are finished (CAUCHY 3.5; CORAL: about a minute)."""
    role_flip_s: float = 0.0
    """Prefill to decode or back: the weights stay (THUNDERSERVE 3.4, table 4: 0 s of reloading)."""
    confidence: Confidence = "assumed"


DEFAULT_COSTS = StartupCosts()
PLACES_GB_PER_S: Mapping[str, float] = {"directory": 0.75, "cache": 2.0, "store": 0.5}
"""What one node reads at from where weights may lie: a directory (a disk, a file server), as above; a cache on local
NVMe; an object store over 4 to 5 Gbps. Assumed, like the rest."""


def from_place(place: str, gb_per_s: float | None, costs: StartupCosts = DEFAULT_COSTS) -> StartupCosts:
    """Costs where weights lie in such a place; with a figure of one's own, that."""
    return replace(costs, load_gb_per_s=PLACES_GB_PER_S[place] if gb_per_s is None else gb_per_s)


@dataclass(frozen=True, slots=True)
class StartupTime:
    """A start in its parts."""

    provision_s: float
    container_s: float
    load_s: float
    engine_init_s: float
    confidence: Confidence

    @property
    def total_s(self) -> float:
        return self.provision_s + self.container_s + self.load_s + self.engine_init_s


def startup_s(weight_bytes: float, nodes: int = 1, costs: StartupCosts = DEFAULT_COSTS) -> StartupTime:
    """From nothing to serving: nodes start side by side, each loading its equal share of the weights."""
    load = weight_bytes / nodes / (min(costs.load_gb_per_s, costs.pcie_gb_per_s) * 1e9)
    return StartupTime(costs.provision_s, costs.container_s, load, costs.engine_init_s, costs.confidence)
