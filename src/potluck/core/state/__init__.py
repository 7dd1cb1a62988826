"""What the Brain knows: events and actions, the fleet, requests, policies and targets."""
