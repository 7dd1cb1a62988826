"""vLLM's engine in this process: for each number on standard input it answers some requests, and says what that cost.

`python -m parts.vllm_rounds KIND MODEL CHANNEL`: without a connector, with one that does nothing, or with ours.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

QUIET = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
REQUESTS, AT_ONCE, PROMPT, OUTPUT, VOCAB = 24, 8, 96, 48, 512
CONNECTORS = {
    "nothing": ("NothingConnector", "parts.vllm_nothing"),
    "ours": ("PotluckConnector", "potluck.vllm.connector"),
}


def main(kind: str, model: str, channel: str) -> None:
    os.environ |= QUIET
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig, KVTransferConfig

    more: dict[str, object] = {}
    if kind in CONNECTORS:
        name, module = CONNECTORS[kind]
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector=name,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"channel": channel} if kind == "ours" else {},
        )
    if kind == "ours":  # as an adapter starts it
        more["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = LLM(
        model, dtype="float32", distributed_executor_backend="uni", enforce_eager=True, block_size=32,
        kv_cache_memory_bytes=1 << 26, max_num_seqs=AT_ONCE, max_num_batched_tokens=256, max_model_len=2048,
        disable_log_stats=False, **more,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    print("ready", flush=True)
    for line in sys.stdin:
        drawn = random.Random(int(line))
        prompts = [{"prompt_token_ids": drawn.choices(range(3, VOCAB), k=PROMPT)} for _ in range(REQUESTS)]
        before_s = time.process_time()
        engine.generate(prompts, sampling, use_tqdm=False)
        print(json.dumps(time.process_time() - before_s), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
