"""Several processes for clients, one for the Brain: `potluck serve --workers N`.

mail.py      lines of JSON between the two, many in one write
crew.py      the Brain's side: starts workers, hears them, starts those again that died
remote.py    a worker's side: its line to the desk, its directory, its meter
hand.py      a worker's process

All workers listen on one port (SO_REUSEPORT: the system deals connections out). What a request needs decided goes to
the one Brain, so weights, affinity and admission hold across workers; limits of keys hold through memory that all of
them see (`door/slates.py`), since a question to the desk for every request would cost more than it settles.
"""
