"""Generated simulation results for tests of summaries and reports."""

from __future__ import annotations

import numpy as np

from potluck.core.values.types import Slo
from potluck.sim.results.records import (
    ANSWERED,
    REFUSED,
    FaultRecord,
    LinkRecord,
    ReplicaRecord,
    RequestRecords,
    SimResult,
    StateSamples,
)

MODELS = ("chat", "<b>code</b> & \"more\" 'x'")
SLOS = {MODELS[0]: Slo(2.0, 0.06, 0.9), MODELS[1]: Slo(0.8, 0.05, 0.95)}


def made_records(requests: int, seed: int = 0, models: tuple[str, ...] = MODELS) -> RequestRecords:
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(0.05, requests))
    model = rng.integers(len(models), size=requests)
    output = np.maximum(1, rng.lognormal(4.8, 1.0, requests)).astype(np.int32)
    swing = 1 + 2.5 * np.sin(arrival_s / max(float(arrival_s[-1]), 1e-9) * 6.3) ** 2
    ttft_s = rng.lognormal(-1.6 + 0.3 * model, 0.5, requests) * swing
    tpot_s = rng.lognormal(-3.5, 0.25, requests) * (1 + 0.3 * swing)
    refused = rng.random(requests) < 0.004
    first_s = np.where(refused, np.nan, arrival_s + ttft_s)
    finish_s = np.where(refused, arrival_s + 1.0, arrival_s + ttft_s + tpot_s * (output - 1))
    return RequestRecords(
        models,
        arrival_s,
        model.astype(np.int16),
        np.maximum(1, rng.lognormal(6.5, 1.0, requests)).astype(np.int32),
        output,
        np.where(refused, 0, output).astype(np.int32),
        first_s,
        finish_s,
        np.where(refused, REFUSED, ANSWERED).astype(np.int8),
        refused.astype(np.int8),
        np.ones(requests, dtype=np.int16),
        np.zeros(requests, dtype=np.int16),
        np.zeros(requests, dtype=np.int8),
        rng.integers(4, size=requests).astype(np.int32),
        rng.integers(4, size=requests).astype(np.int32),
        np.zeros(requests, dtype=np.int32),
        np.zeros(requests),
    )


def made_replica(index: int, end_s: float, models: tuple[str, ...] = MODELS) -> ReplicaRecord:
    """Every third one flips, every fifth one is lost, every seventh one drains; the rest start and stay."""
    role = ("prefill", "decode", "mixed")[index % 3]
    changes = [
        (0.02 * end_s * (index % 4), "starting", role),
        (0.02 * end_s * (index % 4 + 1), "ready", role),
    ]
    if index % 3 == 0:
        changes.append((0.5 * end_s, "ready", "decode"))
    if index % 7 == 6:
        changes += [(0.7 * end_s, "draining", role), (0.75 * end_s, "stopped", role)]
    elif index % 5 == 4:
        changes.append((0.6 * end_s, "lost", role))
    unit = f"{role}-8xH100@us-east-1#{index // 2}"
    return ReplicaRecord(
        id=f"{unit}/{index % 2}",
        unit=unit,
        template=f"{role}-8xH100",
        model=models[index % len(models)],
        region="us-east-1",
        role=role,
        nodes=("8xH100",) if index % 2 else ("2xL40S",),
        gpus=8 if index % 2 else 2,
        changes=tuple(changes),
        busy_s=0.4 * end_s,
        prefill_tokens=10_000,
        decode_tokens=10_000,
        gaps=((0.02, 900.0), (0.025, 80.0), (0.03, 20.0)),
    )


def made_result(requests: int = 2000, replicas: int = 9, seed: int = 0, samples: int = 300) -> SimResult:
    records = made_records(requests, seed)
    end_s = float(np.nanmax(records.finish_s))
    rng = np.random.default_rng(seed + 1)
    people = tuple(made_replica(index, end_s) for index in range(replicas))
    at_s = np.linspace(end_s / samples, end_s, samples)
    wave = 0.5 + 0.4 * np.sin(np.outer(at_s / end_s * 12, np.ones(replicas)) + np.arange(replicas))
    sampled = StateSamples(
        at_s,
        rng.poisson(6 * wave).astype(np.int32),
        rng.poisson(40 * wave).astype(np.int32),
        np.clip(wave, 0, 1),
        np.cumsum(wave * end_s / samples, axis=0),
        np.cumsum(rng.random((samples, 2)) * 1e9 * end_s / samples, axis=0),
    )
    links = (
        LinkRecord("us-east-1", "us-west-2", "link", 25.0, float(sampled.link_bytes[-1, 0]), end_s / 2),
        LinkRecord("us-west-2", "us-east-1", "link", 10.0, float(sampled.link_bytes[-1, 1]), end_s / 3),
    )
    faults = (FaultRecord(0.6 * end_s, "replica <4> lost"), FaultRecord(0.3 * end_s, "link slow, 40 %"))
    rates = ((0.0, 40.0), (0.4 * end_s, 60.0), (0.75 * end_s, 50.0))
    return SimResult(records, SLOS, people, links, end_s, rates, sampled, faults, {}, seed)
