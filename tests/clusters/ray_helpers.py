"""A Ray cluster of several nodes on this machine, with declared GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE_BYTES = 80_000_000
SMALL = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
NODES: dict[str, dict[str, Any]] = {
    "L4": {"num_gpus": 2, "resources": {"accelerator_type:L4": 1}, "labels": {"region": "east"}},
    "A10": {"num_gpus": 0, "resources": {"A10": 2}, "labels": {"region": "east"}},
    "L40S": {"num_gpus": 1, "resources": {"accelerator_type:L40S": 1}, "labels": {"region": "west"}},
}
"""Two say what they have as Ray finds it out on real GPUs, one by a resource of its own."""


@contextmanager
def three_nodes() -> Iterator[tuple[Any, dict[str, Any]]]:
    """(the cluster, its nodes by what they have); the head has no GPU, and is where the controller runs."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    from ray.cluster_utils import Cluster

    for left in (2, 1, 0):
        cluster = Cluster()
        try:
            cluster.add_node(**SMALL, num_gpus=0)
            nodes = {name: cluster.add_node(wait=False, **SMALL, **more) for name, more in NODES.items()}
            cluster.wait_for_nodes(120)
            break
        except Exception:  # Ray gives a node 30 s to start, whatever else its machine has to do
            cluster.shutdown()
            if not left:
                raise
    try:
        yield cluster, nodes
    finally:
        cluster.shutdown()
