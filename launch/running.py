"""Ranks for the length of a `with` block: started, ready, stopped, and proven to have left nothing behind.

Used by the demo and by tests. The ranks run under `phase-parallel up` in a process of its own, so a test
exercises the very command that a user types.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from .errors import LaunchError
from .find_host import find_host
from .parent import Parent
from .paths import PACK_ROOT, make_run_folder
from .ports import free_port, is_free
from .records import LaunchRecord, process_birth, read_record, record_path

# The ranks are gone within a second; on a busy machine Python itself takes a few more to end.
STOP_S = 30.0
POLL_S = 0.2


class Launch:
    """`with Launch(ranks=4, models=[folder]) as launch: post(launch.url + "/prompt", ...)`.

    folder: temporary, removed at the end.
    environment: variables for the launch on top of this process's own (COMFYUI_DIR chooses the ComfyUI).
    announce: receives the launcher's own lines while the ranks start.

    Raises LaunchError when the ranks do not become ready, and at the end when something is left of them.
    """

    def __init__(
        self,
        *,
        ranks: int = 4,
        plan: str = "auto",
        device: str = "cpu",
        models: Sequence[Path] = (),
        comfy_flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        restarts: int = 0,
        timeout_s: float = 600.0,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._options = ["--ranks", str(ranks), "--plan", plan, "--device", device, "--restarts", str(restarts)]
        for model in models:
            self._options += ["--model", str(model)]
        self._comfy_flags = list(comfy_flags)
        self._environment = {**os.environ, **(environment or {})}
        self._timeout_s = timeout_s
        self._announce = announce or (lambda line: None)
        self._announced = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._record: LaunchRecord | None = None

    def __enter__(self) -> Launch:
        self.folder = make_run_folder()
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self._end_process()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record = read_record(self.pid) or self.record
        self._end_process()
        left = what_is_left(record)
        shutil.rmtree(self.folder, ignore_errors=True)
        if error is None and left:
            raise LaunchError(f"The launch has left behind: {', '.join(left)}.")

    @property
    def pid(self) -> int:
        """Process id of `phase-parallel up`."""
        assert self._process is not None
        return self._process.pid

    @property
    def record(self) -> LaunchRecord:
        """As of the moment when the ranks became ready."""
        assert self._record is not None
        return self._record

    @property
    def url(self) -> str:
        return self.record.url

    @property
    def urls(self) -> list[str]:
        return [self.url] + [f"http://127.0.0.1:{entry.port}" for entry in self.record.ranks[1:]]

    @property
    def output_folder(self) -> Path:
        """Where rank 0 saves images."""
        return self.folder / "base" / "output"

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def last_lines(self, count: int) -> str:
        return "\n".join(self.log.splitlines()[-count:])

    def _start(self) -> None:
        base = self.folder / "base"
        flags = list(self._comfy_flags)
        if self._host_is_in_place():
            # That ComfyUI keeps its own folders; only what it saves is led away from the user's images.
            flags += ["--output-directory", str(self.output_folder)]
            self.output_folder.mkdir(parents=True)
        else:
            self._options += ["--base", str(base)]
        self._options += ["--started-by", str(Parent(os.getpid(), self.folder))]
        command = [
            sys.executable,
            str(PACK_ROOT / "__main__.py"),
            "up",
            "--port",
            str(free_port()),
            *self._options,
        ]
        with (self.folder / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *(["--", *flags] if flags else [])],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal reaches us alone; we then stop the launch in order.
                start_new_session=True,
            )

    def _host_is_in_place(self) -> bool:
        return find_host(lambda line: None, comfy_dir=self._environment.get("COMFYUI_DIR")).in_place

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            self._pass_on_lines()
            if self._process.poll() is not None:
                raise LaunchError(f"The launch ended at once:\n{self.last_lines(40)}")
            record = read_record(self._process.pid)
            if record is not None and record.state == "ready":
                self._record = record
                return
            time.sleep(POLL_S)
        raise LaunchError(f"The ranks were not ready after {self._timeout_s:.0f} s:\n{self.last_lines(40)}")

    def _pass_on_lines(self) -> None:
        lines = [line for line in self.log.splitlines() if line.startswith("[phase-parallel] ")]
        for line in lines[self._announced :]:
            self._announce(line.removeprefix("[phase-parallel] "))
        self._announced = len(lines)

    def _end_process(self) -> None:
        """Stop `up` the way a user does, or kill it when that fails."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def what_is_left(record: LaunchRecord) -> list[str]:
    """Processes, ports and files of a launch that should be over, in words."""
    pids = [record.pid] + [entry.pid for entry in record.ranks if entry.pid is not None]
    left = [f"process {pid}" for pid in pids if process_birth(pid) is not None]
    left += [f"port {entry.port}" for entry in record.ranks if not is_free(entry.port, entry.address)]
    left += [str(path) for path in (Path(record.run_folder), record_path(record.pid)) if path.exists()]
    return left
