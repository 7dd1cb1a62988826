"""Who may come in, what is asked, what the answer looks like.

front.py       every request of a client: who asks, what for, and an answer whatever happens
keys.py        who may ask: a file of keys, read again when it changes;  allowances.py: how much each may ask
slates.py      the same across the workers of a gateway
cards.py       what is known of each model: its tokenizer, its context, how it draws
wishes.py      a body as what is wanted;  asking.py: with its tokens, what the driver is asked for
counting.py    text to tokens, long ones off the event loop
answering.py   one request's answer;  voice.py: one of its choices;  relays.py: what plain servers write, counted
repeats.py     answers kept for whoever asks again;  recording.py: how they are written, and read
responses.py   /v1/responses, as a chat
replies.py     errors and other small answers
"""
