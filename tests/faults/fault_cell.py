"""One line of the fault tests' table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Cell:
    """What one fault led to. ``seconds``: until the user saw ``sentence``."""

    fault: str
    phase: str
    rank: int
    seconds: float = 0.0
    sentence: str = ""
    next_prompt: str = "not reached"
