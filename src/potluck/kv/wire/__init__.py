"""The bytes between two engines: frames and checksums. No I/O."""
