"""Python imports this in every process of a launch whose PYTHONPATH names this folder: it lets a test break a rank of a real ComfyUI.

The pack itself knows nothing of it. The injector is installed as soon as ComfyUI has imported the pack, whatever name it gave to it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

LAST = ".nodes.registry"
"""The pack's module that imports all others."""


class AfterThePack(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.endswith(LAST):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.path.append(str(Path(__file__).resolve().parents[1]))
            package = name.removesuffix(LAST)
            install = importlib.import_module("injector").install
            install(lambda part: importlib.import_module(f"{package}.{part}"), Path(os.environ["TEST_ORDERS"]), int(os.environ["RANK"]))

        spec.loader.exec_module = exec_module
        return spec


if "TEST_ORDERS" in os.environ and "RANK" in os.environ:
    sys.meta_path.insert(0, AfterThePack())
