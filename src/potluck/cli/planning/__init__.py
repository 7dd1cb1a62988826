"""Commands about specs and plans: what is known, what to rent, what to change."""
