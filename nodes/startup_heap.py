"""Garbage collections that do not hold a rank up.

ComfyUI collects all garbage after a prompt, every ten seconds at most. That takes a quarter of a second in a process with so many modules, in which
no message leaves it: a cancel is seen that much later, and the other ranks wait for this one.
"""

from __future__ import annotations

import gc


def set_startup_aside() -> None:
    """Collections no longer look at what lives now. Call when the server starts: modules, classes and functions are there and stay, no model is."""
    gc.collect()
    gc.freeze()
