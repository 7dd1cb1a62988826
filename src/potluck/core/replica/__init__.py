"""Inside one replica: what it computes next, and which blocks hold what."""
