"""Names of files in the run folder that one process writes and others read."""

ENGINE_STATE_PREFIX = "state-scheduler-"
"""The counters of a replica's scheduler, as `EngineStatus` publishes them. The replica's number follows."""
