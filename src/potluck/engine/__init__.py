"""The embedded engine: a small, real transformer engine on PyTorch, for a CPU or a GPU.

Read it in this order:

    config.py       what a model is, beyond core.Model: rope, norms, routing
    checkpoint.py   tensors by name: from safetensors files, from a seed, from memory
    step.py         one step of a batch, laid out once and used by every layer
    attention/      full and window (full.py), latent (latent.py), linear (linear.py), over pages (paged.py)
    ffn.py, moe.py  the other half of a layer
    stack.py        a range of layers: a whole model, or one stage of a pipeline
    tables.py       which block of the cache holds which tokens;  cache.py: the tensors behind the blocks
    matrix.py       weights, and products with them;  kernels/: inner loops on a CPU, compiled
    graphs.py       decode steps recorded as CUDA graphs
    runner.py       a step: tokens or hidden states in, hidden states or logits out
    sample.py       from logits to tokens
    handover.py     a sequence's cache as bytes, layer by layer, and back
    reference.py    the same models as plain differentiable functions: what tests compare with, and what is trained
    exact.py        why the answer does not depend on how the work was cut

and its server:

    executor.py     what computes, as the loop sees it;  pipeline/: over processes;  paced.py: at another GPU's pace
    loop.py         schedule, run, tell;  lanes.py: several steps under way;  rows.py, prefix.py: what is known
    driver.py       the loop's thread, and the door to it;  requests.py, status.py: what goes through the door
    face/           HTTP;  frames.py: a hand-over as bytes;  tokens.py, stops.py: text
    serve.py        all of it put together
"""

import os

# The matrix library reads this at its first product; see exact.py. A value that the user has set stays.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
