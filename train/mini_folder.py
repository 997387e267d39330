"""The shipped mini checkpoints as complete folders: the repository holds what both have alike, autoencoder and vision tower, once. Imports its neighbours."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from pathlib import Path

from ..parallel.checkpoint import INDEX_NAME
from .errors import MiniError
from .mini import NAMES, SHARED, Kind

SHIPPED = Path(__file__).parent / "checkpoints"
NEEDED = ("config.json", "generation_config.json", INDEX_NAME, "system_prompt.py", "tokenizer.json", "tokenizer_config.json")
_AGAIN = "get it again from where this pack came from"


def mini_folder(kind: Kind, target: Path, *, shipped: Path = SHIPPED) -> Path:
    """The complete folder of that checkpoint, `target`/its name; made there of links, or of copies where the file system has none, unless it is there.

    A folder of another version is replaced. Raises MiniError when something is missing of what the pack ships, and when `target` cannot be written.
    """
    files = _files(kind, shipped)
    folder = target / NAMES[kind]
    if _is_made_of(folder, files):
        return folder
    unfinished = target / f"{folder.name}.unfinished"
    try:
        for old in (unfinished, folder):
            _remove(old)
        unfinished.mkdir(parents=True)
        for name, source in files.items():
            _place(source, unfinished / name)
        unfinished.rename(folder)
    except OSError as error:
        raise MiniError(f"The complete checkpoint cannot be put into {folder} ({error}); make that place writable.") from error
    return folder


def _files(kind: Kind, shipped: Path) -> dict[str, Path]:
    """Name in the folder -> where the pack has it."""
    own = shipped / NAMES[kind]
    if not shipped.is_dir():
        raise MiniError(
            f"This version of the pack comes without the mini checkpoints; make them with `phase-parallel train` and put both folders into {shipped}."
        )
    if not own.is_dir():
        raise MiniError(f"{own} is missing, so there is no {NAMES[kind]}; {_AGAIN}.")
    files = {path.name: path for path in sorted(own.iterdir()) if path.is_file()}
    missing = [name for name in NEEDED if name not in files]
    if missing:
        raise MiniError(f"{own} lacks {missing[0]}; {_AGAIN}.")
    shards = _shards(own)
    if kind == "distil":
        files |= _shared_shard(shards, shipped)
    missing = [name for name in shards if name not in files]
    if missing:
        raise MiniError(f"{own} lacks {missing[0]}, which its {INDEX_NAME} names; {_AGAIN}.")
    return files


def _shared_shard(shards: dict[str, set[str]], shipped: Path) -> dict[str, Path]:
    """The last shard of Distil is the last one of Instruct, under Distil's name."""
    source = shipped / NAMES["instruct"]
    if not (source / INDEX_NAME).is_file():
        raise MiniError(f"{source} is missing, with which {NAMES['distil']} shares its last shard; {_AGAIN}.")
    theirs = _shards(source)
    name, other = _last(shards, shipped / NAMES["distil"]), _last(theirs, source)
    if shards[name] != theirs[other]:
        raise MiniError(f"{name} of {NAMES['distil']} and {other} of {NAMES['instruct']} hold other keys, but should be one file; {_AGAIN}.")
    if not (source / other).is_file():
        raise MiniError(f"{source} lacks {other}, which {NAMES['distil']} needs too; {_AGAIN}.")
    return {name: source / other}


def _last(shards: dict[str, set[str]], folder: Path) -> str:
    """The shard of autoencoder and vision tower."""
    for name, keys in shards.items():
        if all(key.startswith(SHARED) for key in keys):
            return name
    raise MiniError(f"{INDEX_NAME} of {folder} names no shard of the autoencoder and the vision tower alone; {_AGAIN}.")


def _shards(folder: Path) -> dict[str, set[str]]:
    """Shard -> its keys."""
    try:
        places: dict[str, str] = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, set[str]] = {}
        for key, name in places.items():
            shards.setdefault(name, set()).add(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MiniError(f"{folder / INDEX_NAME} cannot be read ({error}); {_AGAIN}.") from error
    return shards


def _is_made_of(folder: Path, files: dict[str, Path]) -> bool:
    if not folder.is_dir() or {path.name for path in folder.iterdir()} != set(files):
        return False
    return all(os.path.samefile(folder / name, source) or filecmp.cmp(folder / name, source, shallow=False) for name, source in files.items())


def _remove(old: Path) -> None:
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


def _place(source: Path, target: Path) -> None:
    """A hard link: the loader takes no symbolic link out of its folder."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
