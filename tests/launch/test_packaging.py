"""The metadata against the tree: every package is listed, every data pattern finds something."""

from __future__ import annotations

import tomllib

from phase_parallel.launch.paths import PACK_ROOT

PROJECT = tomllib.loads((PACK_ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed() -> None:
    tops = ("bench", "kernels", "launch", "models", "nodes", "parallel", "train")
    found = {"phase_parallel"}
    for top in tops:
        for init in (PACK_ROOT / top).rglob("__init__.py"):
            found.add(".".join(("phase_parallel", *init.parent.relative_to(PACK_ROOT).parts)))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_data_pattern_finds_files() -> None:
    for pattern in PROJECT["tool"]["setuptools"]["package-data"]["phase_parallel"]:
        assert any(path.is_file() for path in PACK_ROOT.glob(pattern)), pattern


def test_nothing_that_comfyui_ships_is_required() -> None:
    assert PROJECT["project"]["dependencies"] == []
