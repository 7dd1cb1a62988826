"""KV as cargo: made small, sent, checked, and kept for those who come again with the same beginning."""
