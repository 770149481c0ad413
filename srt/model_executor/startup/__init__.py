"""Prepare a worker for its first request: compile kernels, measure the largest step, create the runner, and warm it up.

Read `start_runner.py` first.
"""
