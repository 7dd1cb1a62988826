"""The live code under one seed: gateway, controller and mock engines in one process, in virtual time.

virtual.py      the machine: clock, chance, files, processes that can be killed or frozen
loop.py         an event loop whose time is virtual, and a network between named hosts
engines.py      mock engines: HTTP and KV, and what can go wrong with them
mock.py         the mock engine that ships, with its KV transport
threads.py      threads of which one runs at a time; sockets.py: sockets that block
transport.py    the KV transport by itself
clients.py      clients: they stream, leave, stall, retry, and check each token
world.py        a gateway or a controller's whole service put together, and its faults
rules.py        what is always true
bugs.py         bugs put in on purpose, to see that they are found
real.py         the same faults against real processes; real_engine.py: an engine as one
__main__.py     `python -m worlds SEED` tells what happened

Clock and chance are replaced before anything of the product is imported.
"""

from worlds import virtual

virtual.install()
