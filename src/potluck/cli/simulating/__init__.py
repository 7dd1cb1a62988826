"""Commands that run a plan in simulation, or a log again."""
