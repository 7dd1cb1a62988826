"""For operators: metrics, the fleet, what happens right now."""
