"""Attention by kind: full and window (`full.py`), latent (`latent.py`), linear (`linear.py`)."""
