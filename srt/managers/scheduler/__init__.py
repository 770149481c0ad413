"""The scheduler process, `python -m srt.managers.scheduler`: it decides which requests each step of the model serves.

Read `scheduler.py` first: the state machine, without sockets and without a clock. `process.py` is the process around it, `planner.py`
makes the plan of a step, `results.py` applies the workers' results, `outbox.py` collects what is to be sent to frontends. Everything but
`process.py` and the modules that only it uses is compiled if there is a C compiler (`srt.utils.compiled`).
"""
