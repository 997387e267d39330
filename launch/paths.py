"""Where things lie: the checkout, what it keeps between runs, and the per-user folder that running launches
share.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from .errors import LaunchError

PACK_ROOT = Path(__file__).resolve().parent.parent

# Kept between runs and ignored by git: a ComfyUI, the folders of `up`, small checkpoints.
STATE_FOLDER = PACK_ROOT / ".hosts"

# Every temporary folder of ours starts like this; nothing else is ever removed.
RUN_PREFIX = "phase_parallel_"


def runtime_folder() -> Path:
    """The folder (mode 0700) with one small record per running launch of this user."""
    parent = os.environ.get("XDG_RUNTIME_DIR")
    if parent and os.access(parent, os.W_OK):
        folder = Path(parent) / "phase_parallel"
    else:
        folder = Path(tempfile.gettempdir()) / f"phase_parallel_{os.getuid()}_launches"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    # In a world-writable /tmp somebody else could have made the folder first.
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise LaunchError(
            f"{folder} does not belong to this user alone; "
            "remove it, or point XDG_RUNTIME_DIR at a private folder."
        )
    return folder


def make_run_folder() -> Path:
    """A fresh private folder (mode 0700) for the temporary files of one launch."""
    return Path(tempfile.mkdtemp(prefix=RUN_PREFIX))
