"""Who is sent and who waits: what replicas can take, a fair queue before them, refusals in time."""
