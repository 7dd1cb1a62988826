"""Engines on the nodes of a Ray cluster.

nodes.py        what the cluster's nodes are, and what is asked of one: pure
supervisor.py   an actor that looks after one process on its node
crew.py         the actors of one engine: created, asked, ended
launcher.py     a launcher over them, with health checks of its own
"""
