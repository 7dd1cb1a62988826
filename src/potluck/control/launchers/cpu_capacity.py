"""Whether a machine can act as the GPUs of a plan: what its engines would compute, in CPU-seconds a second.

Engines that act as GPUs compute a small model for real. For model m with r requests/s, prompts of I and answers of O
tokens, D replicas that answer and a step of S seconds on their GPUs, with this machine's c_p for a prompt token, c_0
for a step and c_1 for each sequence in it:

    CPUs = sum over m of  r I c_p  +  min(D / S, r O) c_0  +  r O c_1

A step makes a token of each sequence in it, so there are no more steps than tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite

from potluck.core.figures import digits
from potluck.core.values.plan import Plan
from potluck.core.values.types import Traffic

SLOW = 1.25
"""Times as many CPUs as there are that may be asked for before it is said."""
HALVINGS = 12


@dataclass(frozen=True, slots=True)
class CpuCost:
    """CPU-seconds that the small model takes."""

    prompt_token_s: float
    step_s: float
    """Of a step of answers, however many are in it ..."""
    sequence_s: float
    """... and of each of them."""


def cost_of(said: object) -> CpuCost | None:
    """As a nursery says it; None where it does not."""
    if not isinstance(said, Mapping):
        return None
    found = [said.get(each.name) for each in fields(CpuCost)]
    numbers = [each for each in found if isinstance(each, int | float) and isfinite(each) and each >= 0]
    return CpuCost(*numbers) if len(numbers) == len(found) else None


def needed_cpus(plan: Plan, traffic: Iterable[Traffic], cost: CpuCost) -> float:
    """How many CPUs would be busy all the time at the rates that the plan is for."""
    step_s = {each.model: each.tpot_s for each in plan.predictions}
    answering: dict[str, int] = {}
    for each in plan.deployments:
        template = plan.template(each.template)
        decoders = sum(replica.role != "prefill" for replica in template.replicas)
        answering[template.model] = answering.get(template.model, 0) + decoders * each.count
    total = 0.0
    for asked in traffic:
        prompts = asked.rate_per_s * asked.mean_input_tokens
        answers = asked.rate_per_s * asked.mean_output_tokens
        length_s = step_s.get(asked.model, 0.0)
        steps = min(answers, answering.get(asked.model, 0) / length_s) if length_s > 0 else answers
        total += prompts * cost.prompt_token_s + steps * cost.step_s + answers * cost.sequence_s
    return total


def slow_line(plan: Plan, traffic: Iterable[Traffic], cost: CpuCost, cpus: int) -> str:
    """What is said of a machine that is too slow for it; nothing where it is not."""
    asked = tuple(traffic)
    times = needed_cpus(plan, asked, cost) / max(1, cpus)
    if times < SLOW:
        return ""
    rate = sum(each.rate_per_s for each in asked)
    low, high = 0.0, 1.0  # shares of that rate; what is needed grows with it, and not evenly
    for _ in range(HALVINGS):
        share = (low + high) / 2
        less = (replace(each, rate_per_s=share * each.rate_per_s) for each in asked)
        low, high = (share, high) if needed_cpus(plan, less, cost) <= cpus else (low, share)
    return (
        f"this machine would have to compute {times:.1f} times faster to stand for these GPUs at the planned "
        f"{digits(rate)} requests/s: beyond about {digits(rate * low)} requests/s latencies are the CPU's, not the "
        "plan's (`--engine pretended` computes nothing, and keeps their pace)"
    )


def cpu_count() -> int:
    """CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # elsewhere than on Linux
        return os.cpu_count() or 1
