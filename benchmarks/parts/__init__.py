"""What several benchmarks share, and processes that they start."""
