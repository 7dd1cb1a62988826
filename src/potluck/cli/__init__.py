"""The commands. Wiring only: each module parses its options, calls a package and prints."""
