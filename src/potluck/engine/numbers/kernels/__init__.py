"""Inner loops of the engine on a CPU, compiled by numba when they are first used and kept on disk.

    vector.py     sixteen numbers at once;  attention.py: over pages
    products.py   products with 16-bit weights on a processor's matrix tiles, and the feed-forward part
    rows.py       norms, gates and linear attention

They get arrays of floats as addresses. Whoever calls them sees to it that shapes are right and tensors stay alive.
"""
