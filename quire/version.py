"""The version, alone in its file so that building the package imports nothing."""

__version__ = "0.1.0"
