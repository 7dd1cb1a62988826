"""Commands about a service that runs: what it does, and what a person wants of it."""
