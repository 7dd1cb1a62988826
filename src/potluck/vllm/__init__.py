"""Stock vLLM as an engine: the connector that it loads, and the adapter before it (`adapter/`).

    connector.py             what vLLM loads (`kv_connector_module_path`): joins the rest to vLLM's own calls
    transfer_scheduler.py    the scheduler's side: which requests send KV or receive it, step by step
    send_worker.py           the worker's side: KV read out of blocks and sent; receive_worker.py: the other way
    vllm_blocks.py           how a layer's KV lies in vLLM's blocks, and what must be alike at both ends of a transfer
    adapter_channel.py       what the connector tells the adapter: transfers, and which prefixes vLLM holds

Apart from `potluck.engine`, whose import changes how the process multiplies; vLLM must not get that. Nothing here
needs a torch of its own: it is vLLM's.
"""
