"""How results are shown and kept: the line that names where a figure comes from, the largest kernels, the file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import BenchError

LARGEST = 10


def rank_words(result: Mapping[str, Any]) -> str:
    return "one rank without its peers" if result["alone"] else "one rank" if result["ranks"] == 1 else f"{result['ranks']} ranks"


def print_head(words: str, result: Mapping[str, Any]) -> None:
    print(f"== {words}, {result['hardware']}, torch {result['torch']}, {result['commit']}")


def print_split(words: str, split_us: Mapping[str, float]) -> None:
    """The largest entries of microseconds by name; nothing where there are none."""
    if split_us:
        top = list(split_us.items())[:LARGEST]
        print(f"   {words}: " + ", ".join(f"{name[:28]} {us / 1e3:.2f}" for name, us in top) + " ms")


def require_writable(out: Path) -> None:
    """Before anything is measured: a result of long work must find its place.

    Raises BenchError when the file cannot be written. Its folder is made.
    """
    if out.is_dir():
        raise BenchError(f"{out} is a folder, and the result is a file; give --out FILE.")
    require_folder(out.parent)
    if out.exists() and not os.access(out, os.W_OK):
        raise BenchError(f"{out} cannot be written; give --out FILE in a place that you may write to.")


def require_folder(folder: Path, *, option: str = "--out") -> None:
    """The folder is made, and a file is written into it and removed again. Raises BenchError, which names the option, when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".phase-parallel-"):
            pass
    except OSError as error:
        raise BenchError(f"nothing can be written into {folder} ({error.strerror or error}); give {option} in a place that you may write to.") from error


def write_result(result: Mapping[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.unfinished")  # whoever is killed here leaves no half of a result
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(out)
