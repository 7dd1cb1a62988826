"""A plan as files for whoever starts machines and processes: shells, Compose, Kubernetes, SkyPilot."""
