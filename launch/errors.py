"""The one error class of the launcher: its text is one sentence for the person at the keyboard."""


class LaunchError(RuntimeError):
    """What is wrong, where, and what to do about it; the command line prints it without a traceback."""
