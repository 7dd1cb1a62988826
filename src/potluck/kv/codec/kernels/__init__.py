"""The codec's inner loops: numba on a CPU (`cpu`), Triton on a GPU (`gpu`, imported only there)."""
