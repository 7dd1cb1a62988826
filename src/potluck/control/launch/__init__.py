"""Who starts engines: behind one small protocol, so that the controller does not care where they run.

base.py      the protocol
command.py   from what an engine is to the command that starts it
process.py   processes of this machine: started, recognised again, ended
local.py     a launcher on this machine
"""
