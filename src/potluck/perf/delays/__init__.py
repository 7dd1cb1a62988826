"""What takes time beside steps: KV on a link, a replica's start."""
