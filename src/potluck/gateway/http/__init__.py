"""Bytes: clients' connections and those to engines. Nothing here knows a model, a key or the Brain.

    clients   port.py (listens) ─▶ visit.py (one connection) ─▶ requests.py (bytes in) ─▶ exchange.py (bytes out)
    engines   calls.py (kept alive) ─▶ wire.py (one connection) ─▶ answers.py (bytes in)
    both      heads.py (a strict grammar), chunks.py, limits.py;  wheel.py: silence;  fetch.py: whole answers

What reads bytes does no I/O: `requests.py`, `answers.py`, `heads.py` and `chunks.py` are fed and asked.
"""
