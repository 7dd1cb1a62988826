"""Planning while a fleet runs: what scaling may start, what was observed, answers to trouble."""
