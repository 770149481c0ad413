"""A worker process, `python -m srt.managers.tp_worker`: one GPU, or one share of a CPU, that executes the scheduler's plans.

Read `process.py` first: it receives plans, hands them to the `ModelRunner` (`srt/model_executor/`), and answers with results.
"""
