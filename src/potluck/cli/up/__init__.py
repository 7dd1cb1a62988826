"""`potluck up`: from a spec, a model or servers that are there to a running service."""
