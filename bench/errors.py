"""What a benchmark raises."""

from __future__ import annotations


class BenchError(RuntimeError):
    """A benchmark that cannot run here; the sentence says what it needs."""
