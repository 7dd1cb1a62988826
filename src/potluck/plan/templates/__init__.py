"""Templates, one file per kind: every way in which a group of nodes can serve a model together."""
