"""For operators: their port, metrics, events, records of use, orders."""
