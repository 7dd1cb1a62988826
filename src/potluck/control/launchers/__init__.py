"""Who starts engines: on this machine, on Ray or on Kubernetes, behind one small protocol (`control_values.py`)."""
