"""OpenAI's API without sockets, for whoever serves it: the embedded engine, and a gateway before engines.

bodies.py     JSON from a client, strictly
fields.py     which fields change nothing, which need an engine that can do them: `Abilities`
asks.py       /v1/completions and /v1/chat/completions as values;  messages.py: a chat's messages
drawing.py    logit_bias and response_format as how tokens are drawn
own.py        requests that ask for more than tokens, for engines that can do it
tokens.py     text to tokens and back, chat templates
growth.py     an answer's text, token by token;  stops.py: stop strings in it
answers.py    the shapes of replies;  chunks.py: the commonest as bytes, written straight
members.py    JSON files that come with a model;  generation.py: what its makers say about drawing
origin.py     requests that a page of somebody else made;  ids.py: `x-request-id`
crowd.py      which connection gives way when there are too many
errors.py     what goes wrong, as a status and OpenAI's error object
"""
