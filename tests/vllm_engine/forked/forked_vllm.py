"""A plugin of vLLM (on PYTHONPATH, as `make test-vllm` has it): its processes are forked, as they are on GPUs.

On a CPU vLLM starts each anew, which imports all of vLLM and torch again: 11 of 27 s of a core for a tiny model.
"""

from __future__ import annotations


def register() -> None:
    from vllm import envs

    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
