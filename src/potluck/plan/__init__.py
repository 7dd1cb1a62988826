"""The planner: from demand and templates to what to rent."""
