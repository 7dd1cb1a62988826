"""The embedded engine: a small, real transformer engine on PyTorch, for a CPU or a GPU.

Its packages, in the order in which to read them:

    model/      what a checkpoint says and holds; the layers
    numbers/    products, and why cutting the work changes no bit (`exact.py`); `kernels/`: inner loops on a CPU
    memory/     paged caches, who holds which block, chunks to hand on, prefixes that are kept, pinned memory
    compute/    one step: laid out, computed, tokens drawn; `executor.py`: the same as the loop sees it
    mock/       the same without computing
    loop/       jobs come in, steps are made of them, tokens go out; one thread
    server/     HTTP
    serve.py    all of it put together;  local_bench.py, http_bench.py: how long steps take
"""

import os
from importlib import resources
from pathlib import Path

from potluck.core.errors import InputError

# The matrix library reads this at its first product; see exact.py. A value that the user has set stays.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def shipped_model() -> Path:
    """The model that comes with this package. Torch is not needed to find it."""
    path = Path(str(resources.files("potluck.engine") / "data" / "words"))
    if not (path / "config.json").is_file():
        raise InputError("--model", "this installation ships no model; give a model's directory")
    return path
