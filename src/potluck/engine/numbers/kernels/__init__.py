"""Inner loops of the engine on a CPU, compiled by numba when they are first used and kept on disk.

    vector.py     sixteen numbers at once;  tiles.py: a processor's matrix tiles, where it has them
    products.py   products with 16-bit weights on those tiles, and the feed-forward part
    rows.py       norms and gates;  attention.py: over pages;  delta.py: linear attention

They get arrays of floats as addresses. Whoever calls them sees to it that shapes are right and tensors stay alive.
"""
