"""Arithmetic: products with matrices, why cutting the work changes no bit, and the compiled inner loops."""
