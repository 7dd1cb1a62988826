"""What both ends share: connections, shared memory, TLS, and how links fare."""
