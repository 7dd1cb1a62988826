"""The engine's face: HTTP for requests, segments, hand-overs and control.

errors.py     what goes wrong here, as potluck.api says it
bodies.py     what clients write, read strictly, within its time and size
hub.py        from the loop's thread to asyncio and back
service.py    what all handlers share: the model's name and text, the role, the limits
generate.py   one answer: tokens become text, stop strings end it
openai.py     /v1/completions, /v1/chat/completions, /v1/models (potluck.api reads and shapes them)
segments.py   /segments: run a part of a request;  carriage.py: its cache, fetched and handed on by potluck.kv
page.py       /: a page for a person
control.py    /status, /role, /drain, /health;  metrics.py: /metrics
app.py        the routes, the key, the limits;  origin.py: pages of others;  peers.py: from whom caches may come
listen.py     the port;  visit.py: one connection;  uploads.py: bodies that are coming
"""
