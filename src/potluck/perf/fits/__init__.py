"""Least squares, CRONUS's predictors, and how far a figure may be off."""
