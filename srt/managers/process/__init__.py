"""Code that a server's processes share: start and end of a child, heartbeats, run-time switches, and traces.

Read `child.py` first: a child's side of the supervisor. `child_process.py` is the parent's side of one child.
"""
