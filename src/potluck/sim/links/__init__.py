"""KV on the move: links with shared bandwidth, and the hand-overs that use them."""
