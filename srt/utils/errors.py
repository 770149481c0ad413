"""Errors that more than one process speaks of."""


class StartError(Exception):
    """The server cannot start, for a reason that the user can change: the text is one clear sentence with the figure and the option."""


class CheckpointChanged(StartError):
    """A process that is to take another one's place would answer with another model."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"The files in {folder} have changed since the server was started: start it anew.")
