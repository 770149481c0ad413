"""Errors that more than one process speaks of."""


class StartError(Exception):
    """The server cannot start, for a reason that the user can change: the text is one clear sentence with the figure and the option."""
