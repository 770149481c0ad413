"""Sampling parameters and their checks, and the worker's batch of them (`sampling_batch_info.py`)."""
