"""The engine's face: HTTP for requests, segments, hand-overs and control.

errors.py     what goes wrong, as a status and OpenAI's error object
bodies.py     what clients write, read strictly
hub.py        from the loop's thread to asyncio and back
service.py    what all handlers share: the model's name and text, the role, the limits
generate.py   one answer: tokens become text, stop strings end it
openai.py     /v1/completions, /v1/chat/completions, /v1/models;  answers.py: the shapes of what they reply
segments.py   /segments: run a part of a request;  carriage.py: its cache, fetched and handed on by potluck.kv
page.py       /: a page for a person
control.py    /status, /role, /drain, /health;  metrics.py: /metrics
app.py        the routes, the key, the limits
"""
