"""Who may import whom (the rooms of the pack), and that importing does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("parallel", "kernels", "models", "nodes", "launch", "bench", "train")
COMFYUI = {"comfy", "comfy_extras", "comfy_execution", "execution", "folder_paths", "latent_preview", "node_helpers", "nodes", "server"}
MAY_IMPORT = {
    "parallel": {"parallel"},
    "kernels": {"kernels"},
    "models": {"models", "kernels", "parallel"},
    "nodes": {"nodes", "models", "kernels", "parallel"},
    "launch": {"launch", "bench", "train", "models", "kernels", "parallel"},
    "bench": {"bench", "train", "models", "kernels", "parallel"},
    "train": {"train", "models", "kernels", "parallel"},
}
PURE = ("parallel/plan.py", "parallel/environment.py", "parallel/ledger.py", "parallel/slicing.py", "models/hunyuan_image_3/keys.py")


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports(path: Path) -> list[tuple[int, str, int]]:
    """(level, module, line) of every import; level 0 is absolute."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.append((node.level, node.module, node.lineno))
        elif isinstance(node, ast.ImportFrom):
            found += [(node.level, alias.name, node.lineno) for alias in node.names]
    return found


def room_of(path: Path, level: int, module: str) -> str | None:
    """Room that a relative import leads to."""
    parts = path.relative_to(ROOT).parent.parts
    base = parts[: len(parts) - level + 1]
    return (*base, *module.split("."))[0]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room: str) -> None:
    wrong = []
    for path in files(room):
        for level, module, line in imports(path):
            where = f"{path.relative_to(ROOT)}:{line} {'.' * level}{module}"
            if level and room_of(path, level, module) not in MAY_IMPORT[room]:
                wrong.append(where)
            top = module.split(".")[0]
            if not level and top == "phase_parallel":
                wrong.append(f"{where} (use a relative import: ComfyUI gives the pack another name)")
            if not level and top in COMFYUI and room != "nodes":
                wrong.append(f"{where} (only nodes/ imports ComfyUI)")
    assert not wrong


@pytest.mark.parametrize("name", PURE)
def test_pure_files_need_only_the_standard_library(name: str) -> None:
    tops = {module.split(".")[0] for level, module, _ in imports(ROOT / name) if not level}
    assert tops <= set(sys.stdlib_module_names)


def test_importing_everything_has_no_effect(tmp_path: Path) -> None:
    """No file, no log handler, no path entry, no thread, no socket, no CUDA context."""
    modules = [
        "phase_parallel." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for room in ("parallel", "kernels", "models", "launch", "bench", "train")
        for path in files(room)
        if path.name not in ("__init__.py", "rank.py")
    ]
    program = f"""
import importlib, logging, os, sys, threading
import torch, safetensors.torch, tokenizers, PIL.Image, numpy
before = (list(sys.path), list(logging.getLogger().handlers), threading.active_count(), sorted(os.listdir('.')), len(os.listdir('/proc/self/fd')))
for name in {modules!r}:
    importlib.import_module(name)
after = (list(sys.path), list(logging.getLogger().handlers), threading.active_count(), sorted(os.listdir('.')), len(os.listdir('/proc/self/fd')))
assert before == after, (before, after)
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
