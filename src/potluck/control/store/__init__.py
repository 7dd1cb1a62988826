"""What the controller must not forget, in one SQLite file.

schema.py   the tables, and how older files become newer ones
store.py    reading and writing them
keys.py     clients' keys;  usage.py: who used what, counted from the gateway's records
lease.py    so that two controllers never act at once
"""
