"""What the Brain asks for is done: dispatcher ─▶ active request ─▶ attempt (segments or relay) ─▶ engines."""
