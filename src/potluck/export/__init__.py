"""A plan as files that deploy it: shells, Compose, Kubernetes, SkyPilot."""
