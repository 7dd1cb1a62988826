"""The loop: jobs come in, steps are made of them, tokens go out. One thread."""
