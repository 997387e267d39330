"""How results are shown and kept: the line that names where a figure comes from, the largest kernels, the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def write_result(result: Mapping[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
