"""Caches made small for a link, and back: as they are, in 8 bits, or in 4."""
