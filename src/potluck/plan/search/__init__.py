"""The best use of a fixed pool of unlike, badly connected GPUs (THUNDERSERVE, section 3)."""
