"""Before one stock vLLM: the face that Potluck's engines have, so that a gateway drives it as any engine.

flags.py      the command that starts vLLM, from a layout
process.py    vLLM started, watched, ended
ears.py       what its connectors tell (channel.py): addresses, hand-overs, steps
requests.py   a segment as a request to vLLM, and its answer as lines
service.py    what all handlers share; status
face.py       HTTP
serve.py      all of it put together
"""
