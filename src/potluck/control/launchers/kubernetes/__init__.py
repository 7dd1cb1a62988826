"""Engines as pods of a Kubernetes cluster.

pods.py       pods of engines, exported or started: pure
crew.py       the pods of an engine over several machines: pure
machines.py   the cluster's nodes as values, and which of them a pod may be on: pure
api.py        the API server: a few calls over HTTP
mirror.py     objects of one kind as they are now, kept by a watch
launcher.py   a launcher over them, with health checks of its own
"""
