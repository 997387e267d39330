"""For waits that nothing in this process can end: better that it ends itself, because then the launcher starts all ranks again."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_STUCK = 70
_log = logging.getLogger(__name__)


@contextmanager
def ending_process_after(limit_s: float, what: str) -> Iterator[None]:
    """Ends this process with EXIT_STUCK when the body is not over within ``limit_s``; ``what`` stands in the last line of its log."""
    over = threading.Event()

    def watch() -> None:
        if not over.wait(limit_s):
            _log.critical("%s was not over within %g s: this process ends, and the launcher starts all ranks again", what, limit_s)
            os._exit(EXIT_STUCK)

    threading.Thread(target=watch, name="phase-parallel-last-resort", daemon=True).start()
    try:
        yield
    finally:
        over.set()
