"""What a model leaves in memory, what fits, and what a step is made of: plain sums."""
