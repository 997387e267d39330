"""The disk under ``phase-parallel bench load``: forgetting files, reading them as fast as it can, and what of a read it really gave."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import BenchError

BLOCK = 16 << 20
PROBE_BYTES = 1 << 30
OWNER = "owner"
"""Holds the number of the process that uses a folder of :func:`own_folder`."""


def forget(files: Iterable[Path]) -> None:
    """Written out, and dropped from the machine's memory. Needs no rights but those on the files, and is a wish: see :func:`fetched`."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def read_whole(files: Iterable[Path]) -> int:
    """Bytes read, one file behind the other."""
    block, total = bytearray(BLOCK), 0
    for file in files:
        with file.open("rb", buffering=0) as handle:
            while count := handle.readinto(block):
                total += count
    return total


def fetched() -> int | None:
    """Bytes that the storage has given to this process so far, as the kernel counts; None where it does not."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def reset_peak() -> bool:
    """The peak memory of this process begins anew; False where the kernel does not let it, and the peak stays that since its start."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def probe(folder: Path, nbytes: int = PROBE_BYTES) -> tuple[float, float]:
    """Bytes per second written and read by one process. Raises OSError."""
    block = os.urandom(min(BLOCK, nbytes))
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(max(1, nbytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        forget([Path(file.name)])
        start = time.perf_counter()
        total = read_whole([Path(file.name)])
        return total / (written - began), total / (time.perf_counter() - start)


@contextmanager
def own_folder(place: Path) -> Iterator[Path]:
    """``place``, made, empty, and removed at the end; what a killed process of this program left there is removed first.

    Raises BenchError when it belongs to somebody else, or cannot be made.
    """
    try:
        if place.exists():
            _require_left_behind(place)
            shutil.rmtree(place)
        place.mkdir(parents=True)
        (place / OWNER).write_text(str(os.getpid()))
    except OSError as error:
        raise BenchError(f"{place} cannot be used for a checkpoint ({error.strerror or error}); give --folder in a place that you may write to.") from error
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _require_left_behind(place: Path) -> None:
    owner = place / OWNER
    if not owner.is_file():
        raise BenchError(f"{place} exists and was not made by this program; give --folder a new name.")
    words = owner.read_text()
    if words.isdigit() and int(words) != os.getpid() and Path(f"/proc/{words}").exists():
        raise BenchError(f"{place} is in use by process {words}; wait for it, or give another --folder.")
