"""Where the calibration comes from: measurements by others, the fits to them, and how wrong those are.

Only `make site` and `lab/accuracy.py` need this package; pyarrow and scipy are imported where they are used.
"""
