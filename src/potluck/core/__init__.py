"""Values and pure decisions. Nothing in here reads a clock, draws a random number or does I/O."""
