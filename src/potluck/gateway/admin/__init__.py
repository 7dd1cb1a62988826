"""For operators: metrics, the fleet, what happens right now.

app.py        their port: /metrics, /snapshot, /events, /fleet, /plan, /wanted, /drain, /cordon, /flip
overseer.py   what it needs of desk/ and fleet/
tally.py      what happens, counted;  families.py: every metric there is;  metrics.py: as Prometheus reads them
feed.py       what happens, as it happens
usage.py      who used what, to bill from
spans.py      segments as OpenTelemetry's spans;  meter.py: tally, usage and spans behind one parts.Meter
"""
