"""The integer program that decides what to rent: values, bounds, column generation, search, explanation."""
