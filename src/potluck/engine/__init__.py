"""The embedded engine: a small, real transformer engine on PyTorch, for a CPU or a GPU.

Its packages, in the order in which to read them:

    model/      what a checkpoint says and holds; the layers
    numbers/    products, and why cutting the work changes no bit (`exact.py`); `kernels/`: inner loops on a CPU
    memory/     paged caches, who holds which block, chunks to hand on, prefixes that are kept
    compute/    one step: laid out, computed, tokens drawn; `executor.py`: the same as the loop sees it
    pipeline/   the same over several processes
    mock/       the same without computing
    loop/       jobs come in, steps are made of them, tokens go out; one thread
    server/     HTTP
    serve.py    all of it put together;  local_bench.py, http_bench.py: how long steps take
"""

import os

# The matrix library reads this at its first product; see exact.py. A value that the user has set stays.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
