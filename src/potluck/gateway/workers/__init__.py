"""A gateway's processes: a supervisor, and several for clients where `potluck serve --workers N` asks for them.

All workers listen on one port, each at a socket of its own that the supervisor holds (SO_REUSEPORT). What a request
needs decided goes to the one Brain, so weights, affinity and admission hold across workers; limits of keys hold
through memory that all of them see (`SharedUse`), since a question to the Brain for every request would cost more.
"""
