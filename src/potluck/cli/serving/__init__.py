"""Commands that start a service or an engine, look at it, change it and load it."""
