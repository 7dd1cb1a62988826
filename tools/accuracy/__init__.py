"""Where the calibration comes from: measurements by others, the fits to them, and how wrong those are.

Nothing outside of `make docs` needs this package, nor pyarrow and scipy, which it imports when called.
"""
