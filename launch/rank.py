"""Entry of every rank: becomes the ComfyUI that the launcher described, inside this very process.

Run as a script by the elastic agent, with the path of the launch's plan. Standard library only: ComfyUI must
be the first to import torch, and this pack must not be imported here under a second name.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

PR_SET_PDEATHSIG = 1
EXIT_ENDED_BY_ITSELF = 3


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the agent dies, in whatever way that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(EXIT_ENDED_BY_ITSELF)


def write_stacks_on_request() -> None:
    """The stacks of all threads go to this rank's log when it crashes, and on SIGUSR1, even while it waits in a collective."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def main() -> int:
    plan = json.loads(Path(sys.argv[1]).read_text())
    die_with(plan["agent_pid"])
    write_stacks_on_request()
    # Both end the process at once: a rank that waits in a collective cannot run a Python handler, and
    # everything that it writes for itself lies in the run folder, which the launcher removes.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    run_folder = Path(plan["run_folder"])
    mine = plan["ranks"][local_rank]
    os.environ.update(mine["environment"])
    # The interpreter read this name when it started; children of this process will read it again.
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    report = run_folder / f"rank{rank}.json"
    report.with_suffix(".new").write_text(json.dumps({"pid": os.getpid(), "restart": restart}))
    report.with_suffix(".new").replace(report)
    script = plan["script"]
    os.chdir(os.path.dirname(script))
    sys.path[0] = os.path.dirname(script)
    sys.argv = [script, *mine["arguments"]]
    if mine["user_folder"]:
        # A host of 2024 has no --user-directory, and its user manager reads this name when it is imported.
        importlib.import_module("folder_paths").user_directory = mine["user_folder"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        # A server that ends is a fault of the launch: a zero would leave the other ranks waiting for it.
        return stop.code if isinstance(stop.code, int) and stop.code else EXIT_ENDED_BY_ITSELF
    except BaseException:
        traceback.print_exc()
        return 1
    return EXIT_ENDED_BY_ITSELF


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that ComfyUI or a library left running must not hold the end back
