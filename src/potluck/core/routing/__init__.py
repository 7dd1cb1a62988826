"""Where a request goes: one file per rule. `router.py` puts them together; docs/policies.md tells them for users."""
