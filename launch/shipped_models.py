"""The mini checkpoints that come with this pack, as complete folders between runs. Imports them, and with them torch, only where one is asked for."""

from __future__ import annotations

from pathlib import Path

from .errors import LaunchError
from .paths import PACK_ROOT, STATE_FOLDER

MINI_STATE = STATE_FOLDER / "mini_checkpoints"
SHIPPED = PACK_ROOT / "train" / "checkpoints"


def complete_folder(folder: Path) -> Path:
    """The folder itself, or for one of the pack's own its complete form: Distil's as shipped lacks a shard that is also Instruct's. Raises LaunchError."""
    if SHIPPED not in folder.resolve().parents:
        return folder
    from ..train.errors import MiniError
    from ..train.mini_folder import completed

    try:
        return completed(folder, MINI_STATE)
    except MiniError as error:
        raise LaunchError(str(error)) from error
