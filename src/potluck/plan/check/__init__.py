"""A finished plan, rechecked without the solver that made it."""
