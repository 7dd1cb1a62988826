"""For operators: their port, metrics, records of use, orders."""
