"""Stock vLLM as an engine: a connector that is loaded into it, and an adapter that stands before it.

    connector.py    what vLLM loads (`kv_connector_module_path`): joins the rest to vLLM's own calls
    booking.py      the scheduler's side: which requests give KV away or take it in, step by step
    giving.py       the worker's side: KV read out of blocks and sent
    taking.py       the worker's side: KV fetched and written into blocks
    blocks.py       how a layer's KV lies in vLLM's blocks; caches.py: which layers there are, as vLLM says
    identity.py     what must be alike at both ends of a hand-over; which vLLM this was tried with
    params.py       what a request says of its hand-overs
    telling.py      which prefixes vLLM holds, for the adapter; held.py: the same there, as a prefix index names them
    stats.py        what came, in vLLM's metrics; channel.py: the same to the adapter, and peers from it

Apart from `potluck.engine`, whose import changes how the process multiplies; vLLM must not get that. Nothing here
needs a torch of its own: it is vLLM's.
"""

from typing import Final

TESTED: Final = ("0.32.0",)
"""The versions of vLLM that this was tried with."""
