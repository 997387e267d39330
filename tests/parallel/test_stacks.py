"""Asking a process where it is: one that is prepared answers, one that is not lives on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from phase_parallel.parallel.stacks import ask_for_stacks, ask_ranks_for_stacks

PREPARED = "from phase_parallel.launch.rank import write_stacks_on_request\nwrite_stacks_on_request()\n"
WAITING = "import sys\ndef here():\n    print('waits', flush=True)\n    sys.stdin.readline()\nhere()\n"


def start(program: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    return process


@pytest.mark.parametrize("prepared", [True, False])
def test_only_a_prepared_process_is_asked_and_both_go_on(prepared: bool) -> None:
    process = start((PREPARED if prepared else "") + WAITING)
    assert ask_for_stacks(process.pid) is prepared
    _, written = process.communicate("\n", timeout=20)
    assert process.returncode == 0
    assert (" in here" in written) is prepared


def test_a_stopped_process_is_not_asked() -> None:
    """It would get the signal together with the one that lets it go on, and its handler would walk through stacks of threads that run."""
    process = start(PREPARED + WAITING)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    asked = ask_for_stacks(process.pid)
    os.kill(process.pid, signal.SIGCONT)
    _, written = process.communicate("\n", timeout=20)
    assert not asked and process.returncode == 0 and written == ""


def test_a_crash_leaves_its_stack() -> None:
    process = start(PREPARED + WAITING + "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    _, written = process.communicate("\n", timeout=20)
    assert process.returncode < 0 and "Segmentation fault" in written and 'File "<string>"' in written


def test_ranks_of_other_machines_and_ended_ones_are_left_out() -> None:
    process = start(PREPARED + WAITING)
    here, ended = socket.gethostname(), subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    records = [
        None,
        {"rank": 1, "host": here, "pid": process.pid},
        {"rank": 2, "host": "elsewhere", "pid": os.getpid()},
        {"rank": 3, "host": here, "pid": ended.pid},
    ]
    assert ask_ranks_for_stacks(records, (1, 2, 3)) == (1,)
    assert ask_ranks_for_stacks(records, ()) == ()
    process.communicate("\n", timeout=20)
