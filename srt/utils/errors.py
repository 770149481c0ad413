"""Errors that more than one process raises or handles."""


class StartError(Exception):
    """The server cannot start, for a reason that the user can change. The message is one clear sentence with the figure and the option."""


class CheckpointChanged(StartError):
    """The checkpoint on disk has changed, so a restarted process would serve another model than the rest of the server."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"The files in {folder} have changed since the server was started: start it anew.")
