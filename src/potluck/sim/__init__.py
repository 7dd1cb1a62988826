"""A discrete-event simulation of a fleet: the same Brain as live, with replicas timed by `perf`."""
