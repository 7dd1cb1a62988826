"""The world that the Brain acts on: requests on their way, machines, faults, reports."""
