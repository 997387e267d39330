"""One small JSON file per running launch, so that `status` finds it, and a lock so that a folder has one
launch.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .errors import LaunchError
from .paths import RUN_PREFIX, runtime_folder


@dataclass
class RankEntry:
    rank: int
    port: int
    pid: int | None = None
    address: str = "127.0.0.1"
    ready: bool = False

    def url(self, record: LaunchRecord) -> str:
        """Where this machine reaches the rank's ComfyUI."""
        return record.url if self.rank == 0 else web_address(self.address, self.port)


@dataclass
class LaunchRecord:
    """What is known about one launch. `state` is starting, ready or stopping; `born` tells a re-used pid
    apart.
    """

    pid: int
    born: int
    launch_id: str
    checkout: str
    base: str
    run_folder: str
    comfyui: str
    device: str
    url: str
    state: str = "starting"
    restarts: int = 0
    ranks: list[RankEntry] = field(default_factory=list)

    def write(self) -> None:
        """Replace the record in one step: a reader never sees half of it."""
        target = record_path(self.pid)
        unfinished = target.with_suffix(".new")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(target)

    def is_alive(self) -> bool:
        return process_birth(self.pid) == self.born


def web_address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def record_path(pid: int) -> Path:
    return runtime_folder() / f"{pid}.json"


def logs_of(record: LaunchRecord) -> Path:
    """Where the agent keeps what the ranks write, by attempt and place on this machine."""
    return Path(record.run_folder) / "logs"


def read_record(pid: int) -> LaunchRecord | None:
    try:
        fields = json.loads(record_path(pid).read_text())
    except FileNotFoundError:
        return None
    return LaunchRecord(**{**fields, "ranks": [RankEntry(**rank) for rank in fields["ranks"]]})


def process_birth(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is no such process (or only its
    remains).
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def parent_of(pid: int) -> int | None:
    """None when there is no such process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """What /proc says, from the state on."""
    try:
        # The command in parentheses may hold spaces: count the fields behind it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def live_records() -> list[LaunchRecord]:
    """The running launches of this user. What a killed launch left behind is removed on the way."""
    found = []
    for path in sorted(runtime_folder().glob("*.json")):
        record = read_record(int(path.stem))
        if record is None:
            continue
        if record.is_alive():
            found.append(record)
        else:
            remove_record(record)
    return found


def remove_record(record: LaunchRecord) -> None:
    """Remove the record and the run folder of a launch that is over."""
    run_folder = Path(record.run_folder)
    if run_folder.name.startswith(RUN_PREFIX) and run_folder.parent == Path(tempfile.gettempdir()):
        shutil.rmtree(run_folder, ignore_errors=True)
    record_path(record.pid).unlink(missing_ok=True)


@contextmanager
def only_launch_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. The kernel drops it with the process, so a killed launch leaves no stale lock.

    Raises LaunchError when another launch holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "launch.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
            raise LaunchError(
                f"Another launch (process {holder}) already runs in {folder}; stop it first, "
                "or give this one a folder of its own with --base."
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
