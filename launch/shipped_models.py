"""The mini checkpoints that come with this pack, as complete folders between runs. Imports them, and with them torch, only where one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .errors import LaunchError
from .paths import PACK_ROOT, STATE_FOLDER

if TYPE_CHECKING:
    from ..train.mini import Kind

MINI_STATE = STATE_FOLDER / "mini_checkpoints"
SHIPPED = PACK_ROOT / "train" / "checkpoints"


def shipped_folder(kind: Kind) -> Path:
    """The complete folder of that one. Raises LaunchError when it cannot be made."""
    from ..train.errors import MiniError
    from ..train.mini_folder import mini_folder

    try:
        return mini_folder(kind, MINI_STATE, shipped=SHIPPED)
    except MiniError as error:
        raise LaunchError(str(error)) from error


def complete_folder(folder: Path) -> Path:
    """The folder itself, or for one of the pack's own its complete form: Distil's as shipped lacks a shard that is also Instruct's. Raises LaunchError."""
    asked = folder.resolve()
    if asked.parent != SHIPPED:
        return folder
    from ..train.mini import NAMES

    return next((shipped_folder(kind) for kind, name in NAMES.items() if name == asked.name), folder)
