"""The supervisor, parent of all processes of a server: it checks options, starts the others, watches them and replaces those that die.

Read `supervisor.py` first: one thread, one selector. `replacer.py` decides what follows from an event and does no I/O; `preflight.py`
refuses what cannot work before any process is started.
"""
