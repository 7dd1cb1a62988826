"""Several plans together: over the hours of a day, or along a frontier."""
