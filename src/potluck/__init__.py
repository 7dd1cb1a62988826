"""Potluck: serve large language models at the lowest cost on whatever GPUs one can get."""

__version__ = "0.1.0"
