"""Where checkpoints are found: the folder type ``hunyuan_image_3`` in ComfyUI, and the folders the launcher
names.

A checkpoint is a folder with config.json and model.safetensors.index.json, as downloaded; nothing is opened
here.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..models.hunyuan_image_3.system_prompts import OFFICIAL_FILE
from ..parallel.environment import MODEL_DIRS
from . import host_compat

FOLDER_TYPE = "hunyuan_image_3"
REQUIRED_FILES = ("config.json", "model.safetensors.index.json")
SEARCH_DEPTH = 2
NOTHING_FOUND = f"no checkpoint in models/{FOLDER_TYPE}"


def search_paths() -> list[Path]:
    """The launcher's folders first, then ComfyUI's."""
    named = [part for part in os.environ.get(MODEL_DIRS, "").split(os.pathsep) if part]
    return [Path(path) for path in named + host_compat.model_folders(FOLDER_TYPE)]


def find_checkpoints(paths: list[Path]) -> dict[str, Path]:
    """Checkpoint name -> folder. A search path may be a checkpoint itself; of two with one name the first is
    kept.
    """
    found: dict[str, Path] = {}
    for path in paths:
        for folder in _walk(path, SEARCH_DEPTH):
            name = folder.name if folder == path else folder.relative_to(path).as_posix()
            found.setdefault(name, folder)
    return found


def _walk(folder: Path, depth: int) -> list[Path]:
    try:
        if not folder.is_dir():
            return []
        if all((folder / name).is_file() for name in REQUIRED_FILES):
            return [folder]
        children = sorted(folder.iterdir()) if depth else []
    except PermissionError:  # lost+found of a mounted disk, say: there is nothing in it for this user
        return []
    return [found for child in children for found in _walk(child, depth - 1)]


def checkpoint_names() -> list[str]:
    """Choices of the loader's folder widget; one explaining entry where there is none."""
    return list(find_checkpoints(search_paths())) or [NOTHING_FOUND]


def checkpoint_folder(name: str) -> Path:
    """Folder of a name. Raises ValueError that says where checkpoints are looked for."""
    paths = search_paths()
    folder = find_checkpoints(paths).get(name)
    if folder is None:
        places = ", ".join(str(path) for path in paths)
        raise ValueError(
            f'There is no checkpoint folder "{name}" (with {" and ".join(REQUIRED_FILES)}) in {places}; '
            f"put the downloaded folder into models/{FOLDER_TYPE} and refresh the page."
        )
    return folder


def fingerprint(folder: Path) -> str:
    """Changes when the checkpoint's small files are replaced, so that a cached loader runs again and the nodes behind it."""
    present = [name for name in (*REQUIRED_FILES, OFFICIAL_FILE) if (folder / name).is_file()]
    return ",".join(f"{name}:{(folder / name).stat().st_mtime_ns}" for name in present)
