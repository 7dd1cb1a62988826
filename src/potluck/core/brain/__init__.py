"""The Brain: events in, actions out; what it knows of the fleet and of every request under way."""
