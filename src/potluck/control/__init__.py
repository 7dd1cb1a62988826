"""The controller: what the Brain wants of the fleet is carried out, one step at a time.

values.py   what is wanted, what was started, what is to be done: frozen
step.py     wanted beside started: what to do next. Pure
"""
