"""Where the calibration comes from: measurements by others, the fits to them, and how wrong those are.

Nothing outside of `potluck accuracy` needs this package, nor pyarrow and scipy, which it imports when called.
"""
