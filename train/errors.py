"""What the room of the mini model raises."""

from __future__ import annotations


class MiniError(ValueError):
    """A mini checkpoint cannot be trained, written or found as asked; the sentence says what to do."""
