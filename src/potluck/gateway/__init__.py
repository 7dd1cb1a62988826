"""The gateway: one OpenAI endpoint over the whole fleet. It drives the core's Brain with sockets.

Its rooms, in the order in which a request goes through them:

    http/     bytes: clients' connections and those to engines; knows no model and no Brain
    door/     who may come in, what is asked, what the answer looks like
    drive/    what the Brain asks for is done: segments sent, tokens passed on, failures told
    desk/     the one Brain with its clock and its log; workers ask it
    fleet/    which engines there are, how they fare, what is wanted of them
    admin/    metrics, the fleet, what happens right now: for operators
    workers/  several processes for clients
    parts.py  what these see of each other
    serve.py  all of it put together
"""
