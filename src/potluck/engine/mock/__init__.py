"""Mock engines: the HTTP server, the speed and the memory of an engine on a GPU, without any arithmetic.

mock_executor.py      tokens drawn from a hash of the sequence instead of logits, and steps that end when they are due
mock_transfer.py      what KV would weigh, how long a network card would take for it, and the names of cached blocks
mock_engine.py        put together, with how long steps would take

Nothing in here may load torch: twenty of these engines share two cores.
"""
