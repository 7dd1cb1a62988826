"""Who changes the fleet, and by which rule: a file per rule, named in `SCALERS` (autoscaler.py)."""
