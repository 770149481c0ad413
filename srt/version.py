"""The version of the project, in a file that imports nothing, so that every module may read it."""

__version__ = "0.2.0"
