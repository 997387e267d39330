"""A process that waits in vain ends with a sentence; one that does not wait lives on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phase_parallel.parallel.last_resort import EXIT_STUCK

PROGRAM = """
import logging, sys, time
from phase_parallel.parallel.last_resort import ending_process_after
logging.basicConfig(stream=sys.stderr)
with ending_process_after(0.5, "connecting the ranks"):
    time.sleep(float(sys.argv[1]))
time.sleep(1.0)
"""


@pytest.mark.parametrize(("seconds", "code"), [("60", EXIT_STUCK), ("0", 0)])
def test_only_a_wait_beyond_the_limit_ends_the_process(seconds: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, seconds], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == code
    assert ("connecting the ranks was not over within 0.5 s: this process ends, and the launcher starts all ranks again" in done.stderr) is bool(code)
