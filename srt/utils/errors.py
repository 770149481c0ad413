"""Errors that more than one process raises or handles."""


class StartError(Exception):
    """The server cannot start, for a reason that the user can change. The message is one clear sentence with the figure and the option."""


class CheckpointChanged(StartError):
    """The checkpoint on disk has changed, so a restarted process would serve another model than the rest of the server."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"The files in {folder} have changed since the server was started: start it anew.")


class WeightsChanged(StartError):
    """The present weights cannot be read again, so a restarted process would serve other weights than its predecessor."""

    def __init__(self, folder: str) -> None:
        """`folder` is where the weights were read from; empty if they came as tensors."""
        super().__init__(
            f"The files in {folder}, which the weights were updated from, have changed or are gone: start the server anew."
            if folder
            else "The weights were updated from tensors, which no file holds, so processes cannot be replaced: start the server anew."
        )


class UpdateError(Exception):
    """The weights cannot be updated, and have not changed on any rank. The message is a sentence for the client."""
