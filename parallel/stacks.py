"""Where is a rank that hangs? It writes the stacks of its threads to its log when it reads that it did not answer. A rank whose threads all stand, because
one of them keeps the interpreter, cannot read, and writes them when it gets ``STACKS_SIGNAL`` (launch/rank.py sees to that).

A signal's handler walks through the stacks of threads that may be running, which can end the process; so it is for those that stand. Imports the standard
library only.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Any

STACKS_SIGNAL = signal.SIGUSR1
_log = logging.getLogger(__name__)


def write_stacks(rank: int) -> None:
    """Of all threads of this process, to its log."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = (f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in sys._current_frames().items())
    _log.warning("rank %d did not answer; it is here:\n%s", rank, "".join(stacks))


def ask_for_stacks(pid: int) -> bool:
    """True when process ``pid`` was asked. A process that does not catch the signal is left alone: it would end. So is one that was stopped: it gets the
    signal when it goes on, with all its threads running."""
    try:
        with open(f"/proc/{pid}/status") as file:
            status = dict(line.split(":", 1) for line in file)
        if not int(status.get("SigCgt", "0"), 16) >> (STACKS_SIGNAL - 1) & 1 or status["State"].split()[0] in "Tt":
            return False
        os.kill(pid, STACKS_SIGNAL)
    except OSError:  # ended, or another user's
        return False
    return True


def ask_ranks_for_stacks(records: Iterable[dict[str, Any] | None], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those of ``ranks`` that run on this machine and were asked."""
    mine = socket.gethostname()
    here = [record for record in records if record is not None and record["host"] == mine]
    return tuple(record["rank"] for record in here if record["rank"] in ranks and ask_for_stacks(record["pid"]))
