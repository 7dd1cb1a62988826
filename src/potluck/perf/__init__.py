"""How long a step, a transfer and a start take, how much fits in memory, and what it costs."""
