"""The process that starts a launch for itself (tests, demo): its launch must end with it, however it ends."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from .rank import PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Parent:
    """Process id, and the folder that the parent made for the launch. A user's shell is no such parent."""

    pid: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.pid}:{self.folder}"

    @classmethod
    def from_text(cls, text: str) -> Parent:
        pid, _, folder = text.partition(":")
        return cls(int(pid), Path(folder))

    def end_with_it(self) -> None:
        """Ask the kernel for a SIGTERM when the parent dies; ends here when it is dead already."""
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self.pid:
            self.tidy_up()
            sys.exit(1)

    def tidy_up(self) -> None:
        """Remove the folder of a parent that was killed and cannot do so itself."""
        if os.getppid() != self.pid:
            shutil.rmtree(self.folder, ignore_errors=True)
