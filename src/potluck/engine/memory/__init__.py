"""What sequences keep: paged caches and states, who holds which block, and the same as chunks to hand on."""
