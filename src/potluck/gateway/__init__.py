"""The gateway: one OpenAI endpoint over the whole fleet. It drives the core's Brain with sockets.

A request goes through these in turn:

    http/        bytes: clients' connections and those to engines; knows no model and no Brain
    openai/      who may ask, what is asked, what the answer looks like
    dispatch/    what the Brain asks for is done: segments sent, tokens passed on, failures told
    core.py      the one Brain with its clock and its log; workers ask it
    registry/    which engines there are, how they fare, what is wanted of them
    admin/       metrics, the fleet, what happens right now: for operators;  page/: the same in a browser
    workers/     several processes for clients, and the supervisor of all
    values.py    what these pass to each other;  serve.py: all of it put together
"""
