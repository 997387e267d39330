"""A checkpoint folder is somebody else's: which of its files are read at all. Imports the standard library only."""

from __future__ import annotations

from pathlib import Path


def why_not_read(path: Path, limit: int | None = None) -> str:
    """Why the file ``path`` of a folder must not be read, in words behind its name; empty when it may be.

    A link may lead to another file of the same folder, or into the ``blobs`` beside ``snapshots``, of which a Hugging Face cache consists; a
    folder as a whole may be a link. ``limit``: bytes that no honest file of this kind has.
    """
    try:
        folder, real = path.parent.resolve(), path.resolve()
        blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
        if not (real.is_relative_to(folder) or real.is_relative_to(blobs)):
            return "is a link to a file outside of its folder, which is not followed; put the file itself there, or link the whole folder"
        if real.exists() and not real.is_file():
            return "is not a file (a pipe or a device would be waited for without end); put the file itself there"
        size = real.stat().st_size if real.is_file() else 0
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        return f"cannot be read ({error})"
    if limit is not None and size > limit:
        return f"is {size / 1e6:.0f} MB, which no checkpoint of this kind needs; this folder is not used"
    return ""
