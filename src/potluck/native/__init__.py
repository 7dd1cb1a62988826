"""Inner loops as machine code: what plan, kv and engine share of numba."""
