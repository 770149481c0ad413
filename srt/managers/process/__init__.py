"""What the processes of a server have in common: how a child starts and ends, heartbeats, switches, and traces.

Read `child.py` first: a child's side of the supervisor. `child_process.py` is the parent's side of one child.
"""
