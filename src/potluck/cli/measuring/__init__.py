"""Commands about how true the performance model is."""
