"""Bytes: clients (`server.py`) and engines (`connection_pool.py`), over one parser that does no I/O."""
