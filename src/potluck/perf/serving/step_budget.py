"""How many tokens a step may hold where prompts are computed beside answers.

Whoever is being answered waits for the chunks of others' prompts. The planner reckons with the prompts of the long
run, evenly spread over the steps; an engine that takes what its budget allows computes a prompt in few long steps,
and short answers beside it miss their objective. Sarathi-Serve (OSDI '24) therefore takes the largest budget whose
step is still short enough. Here that is LONGEST times the TPOT objective, with all the answers that a replica is
planned to make at once: the short steps around it make up for one such step, and prompts still pass quickly.
"""

from __future__ import annotations

from potluck.core.values.types import Slo
from potluck.perf.serving.phases import CHUNK_TOKENS, chunked_iteration_s
from potluck.perf.serving.throughput import best_operating
from potluck.perf.step_timer import StepTimer

LONGEST = 2.0
LEAST_TOKENS = 128


def paced_budget(
    timer: StepTimer, prompt_tokens: int, answer_tokens: int, memory_batch: int, slo: Slo
) -> int:
    """A power of two, from LEAST_TOKENS to CHUNK_TOKENS; CHUNK_TOKENS where the objective cannot be kept anyway."""
    found = best_operating(timer, prompt_tokens, answer_tokens, memory_batch, slo)
    if found is None:
        return CHUNK_TOKENS
    context = prompt_tokens + answer_tokens / 2
    budget = CHUNK_TOKENS
    while budget > LEAST_TOKENS:
        step_s = float(chunked_iteration_s(timer, budget - found.batch, 0.0, found.batch, context)[0])
        if step_s <= LONGEST * slo.tpot_s:
            break
        budget //= 2
    return budget
