"""Engines that only pretend: the face, the pace and the memory of an engine on a GPU, without any arithmetic.

history.py    what a sequence's KV stands for, as one number
words.py      tokens that are drawn from it
cargo.py      what KV would weigh;  freight.py: how long a network card would take for it, and what it says of that
lasting.py    how long a step would take
executor.py   all of it as the loop sees it
prefixes.py   the prefix cache;  moved.py: prefixes that go to another engine
engine.py     put together

Nothing in here may load torch: twenty of these engines share two cores.
"""
