"""The scheduler process, `python -m srt.managers.scheduler`: it decides which requests each step of the model serves.

Read `scheduler.py` first: the state machine, without sockets and without a clock. `process.py` is the process around it, `planner.py`
makes the plan of a step, `results.py` applies what workers answer, `outbox.py` holds what frontends are still to be sent. All but
`process.py` and what only it uses is compiled where a C compiler was found (`srt.utils.compiled`).
"""
