"""Who starts engines: behind one small protocol, so that the controller does not care where they run.

base.py      the protocol
command.py   from what an engine is to the command that starts it
chips.py     GPUs of this machine
process.py   processes of this machine: started, recognised again, ended
nursery.py   a process that forks engines
room.py      memory of this machine
local.py     a launcher on this machine
"""
