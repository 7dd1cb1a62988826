"""KV caches: encoded for a link, sent and checked, and kept for requests with the same prefix."""
