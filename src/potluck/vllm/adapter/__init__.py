"""Before one stock vLLM: the face that Potluck's engines have, so that a gateway drives it as any engine.

flags.py      the command that starts vLLM, from a layout
process.py    vLLM started, watched, ended
ears.py       what its connectors tell (channel.py): addresses, hand-overs, steps
requests.py   a segment as a request to vLLM, and its answer as lines
segments.py   segments that hand on or decode;  own.py: those that answer a client's own request;  telling.py: lines
service.py    what all handlers share; status
face.py       HTTP
serve.py      all of it put together
"""
