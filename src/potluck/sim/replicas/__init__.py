"""One replica: its batches, the time of each step, the prefixes it holds."""
