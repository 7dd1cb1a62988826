"""The receiver: a fetch over several connections, put together to parcels."""
