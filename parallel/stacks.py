"""Where is a rank that hangs? Each rank writes the stacks of its threads to its log when it gets ``STACKS_SIGNAL`` (launch/rank.py sees
to that); this asks for them. Imports the standard library only.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable
from typing import Any

STACKS_SIGNAL = signal.SIGUSR1


def ask_for_stacks(pid: int) -> bool:
    """True when process ``pid`` was asked. A process that does not catch the signal is left alone: it would end."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
        if not int(caught, 16) >> (STACKS_SIGNAL - 1) & 1:
            return False
        os.kill(pid, STACKS_SIGNAL)
    except OSError:  # ended, or another user's
        return False
    return True


def ask_ranks_for_stacks(records: Iterable[dict[str, Any] | None], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those of ``ranks`` that run on this machine and were asked; all of ``records`` when ``ranks`` is empty."""
    mine = socket.gethostname()
    here = [record for record in records if record is not None and record["host"] == mine]
    return tuple(record["rank"] for record in here if (not ranks or record["rank"] in ranks) and ask_for_stacks(record["pid"]))
