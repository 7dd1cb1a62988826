"""Requests to come: arrivals, lengths, shared prefixes."""
