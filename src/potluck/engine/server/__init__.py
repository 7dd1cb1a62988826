"""The engine's HTTP server (aiohttp): requests, segments, hand-overs and control.

http_connection.py   one connection; bodies read strictly, within their time and size; errors in OpenAI's shape
engine_service.py    what all handlers share, and the channels between the loop's thread and asyncio
openai_routes.py     /v1/completions, /v1/chat/completions, /v1/models (potluck.api reads and shapes them)
segment_routes.py    /segments: run a part of a request;  /prefixes: copy a kept prefix from engine to engine
kv_connector.py      their KV, fetched and handed on by potluck.kv
control.py           /, /status, /role, /drain, /health, /metrics, /peers, /grants;  engine_metrics.py: Prometheus
engine_app.py        the routes, the key, the limits, the port
"""
