"""Prefixes that are kept: bytes behind a block pool, in memory and in files."""
