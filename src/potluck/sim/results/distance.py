"""What users see from where they are: the way to where an answer begins, and back from where it is made.

The world counts from a request's arrival at a region. A user sends it half a round trip before, to the region of the
first segment's replica, and has tokens half a round trip after they are made, from the region of the last one's. So
the first token and the last come later by both halves, and TPOT is as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from potluck.sim.results.records import ReplicaRecord, RequestRecords


def as_users_see(
    records: RequestRecords, replicas: Sequence[ReplicaRecord], rtt_s: Mapping[tuple[str, str], float]
) -> RequestRecords:
    """The records with first and last tokens when they reach whoever asked; the same where nobody said where."""
    labels = records.labels
    if labels is None or not rtt_s or labels.origins == ("",):
        return records
    regions = sorted({replica.region for replica in replicas})
    table = np.zeros((len(labels.origins), len(regions) + 1))  # the last column: no replica
    for o, origin in enumerate(labels.origins):
        for r, region in enumerate(regions):
            table[o, r] = rtt_s.get((origin, region), 0.0)
    place = np.array([regions.index(replica.region) for replica in replicas] + [len(regions)], dtype=np.int64)
    origins = labels.from_origin
    far_s = (
        table[origins, place[records.prefill_replica]] + table[origins, place[records.decode_replica]]
    ) / 2
    seen = np.isfinite(records.first_token_s)
    return replace(
        records,
        first_token_s=records.first_token_s + far_s,
        finish_s=np.where(seen, records.finish_s + far_s, records.finish_s),
    )
