"""The integer program that decides what to rent: data, matrix, bounds, column generation, decomposition, outages."""
