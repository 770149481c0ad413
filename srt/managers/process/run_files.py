"""Names of files in the run folder that one process writes and others read."""

ENGINE_STATE_FILE = "state-scheduler-0"
"""The scheduler's counters, as `EngineStatus` publishes them."""
