"""What the Brain asks for is done: segments sent, tokens passed on, failures told.

rides.py     all requests of a worker; what the Brain wants goes to the right one
ride.py      one request: what its user has, which attempt runs, what is told of it
attempts.py  which kind of attempt a route is for
trip.py      one attempt over the face: a leg for each segment, and whose fault it is when one fails
leg.py       one segment at its engine: the lines of its answer, believed only as far as they add up
own.py       the same where an engine answers in its own words;  words.py, retold.py: those, to the client
bodies.py    what a segment's engine is asked
lines.py     bytes to lines to tokens
verdicts.py  what an engine's errors mean to the Brain
patience.py  how long silence is borne, from what an engine does otherwise
"""
