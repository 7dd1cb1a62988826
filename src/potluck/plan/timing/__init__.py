"""What a replica does: its rates within the objective, what lies between replicas, how far off it may be."""
