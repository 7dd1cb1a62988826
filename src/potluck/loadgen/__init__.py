"""A load generator for any server that speaks OpenAI's API.

client.py    requests, each on a connection of its own and timed token by token
prompts.py   what to ask: prompts of given lengths, at given times
measured.py  what came of it: times, objectives, errors by kind
"""
