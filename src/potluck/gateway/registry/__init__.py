"""Which engines there are, how they fare, and what is wanted of them."""
