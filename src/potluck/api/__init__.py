"""OpenAI's API without sockets, for whoever serves it: engines, and a gateway before engines."""
