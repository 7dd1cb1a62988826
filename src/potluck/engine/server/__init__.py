"""The engine's HTTP server (aiohttp): requests, segments, hand-overs and control.

http_connection.py   listener and connections; bodies read strictly, within time and size; errors in OpenAI's shape
request_channels.py  what the loop's thread says about each request, brought to its handler
engine_service.py    what all handlers share
openai_routes.py     /v1/completions, /v1/chat/completions, /v1/models (potluck.api reads and shapes them)
segment_routes.py    /segments: run a part of a request
kv_connector.py      their KV, fetched and handed on by potluck.kv
control.py           /, /status, /role, /drain, /health, /metrics, /peers;  engine_metrics.py: Prometheus
engine_app.py        the routes, the key, the port
"""
