"""Commands that start one engine: what it is, whom it answers, and what is made ready before."""
