"""A gateway's processes: a supervisor, and several for clients where `potluck serve --workers N` asks for them.

parent.py    the supervisor: holds the ports, forks all others, and again when they die
mail.py      lines of JSON between the desk and a worker, many in one write
crew.py      the Brain's side: hears workers and tells them
remote.py    a worker's side: its line to the desk, its directory, its meter
hand.py      a worker's process

All workers listen on one port, each at a socket of its own that the supervisor holds (SO_REUSEPORT: the system deals
connections out). What a request needs decided goes to
the one Brain, so weights, affinity and admission hold across workers; limits of keys hold through memory that all of
them see (`door/slates.py`), since a question to the desk for every request would cost more than it settles.
"""
