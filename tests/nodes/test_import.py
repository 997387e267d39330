"""The pack's front door: what an import does, who may import whom, and how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("kernels", "launch", "models", "nodes", "parallel")
HOST_MODULES = ("comfy", "comfy_execution", "comfy_extras", "folder_paths", "latent_preview", "server")


def sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Absolute names, and relative ones as paths from the pack's root such as ``nodes.driver``."""
    package = path.relative_to(ROOT).parent.parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *([node.module] if node.module else [])))
            found |= {f"{stem}.{alias.name}".strip(".") for alias in node.names}
    return found


def test_import_outside_of_comfyui_registers_nothing() -> None:
    program = (
        "import sys, logging; before = list(sys.path); handlers = list(logging.getLogger().handlers); "
        "import phase_parallel as pack; "
        "assert pack.NODE_CLASS_MAPPINGS == {}; "
        "assert sys.path == before and logging.getLogger().handlers == handlers; "
        "assert not [name for name in sys.modules if name.startswith('phase_parallel.')]; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_front_door_is_short() -> None:
    assert len((ROOT / "__init__.py").read_text().splitlines()) <= 40


@pytest.mark.parametrize("path", sources("kernels", "models", "parallel", "launch"), ids=str)
def test_only_nodes_know_comfyui(path: Path) -> None:
    host = {name for name in imported(path) if name.split(".")[0] in HOST_MODULES}
    # The launcher runs inside the host's process for a moment and asks it where its user folder is.
    assert not host or path.parent.name == "launch", f"{path.name} imports {sorted(host)}"


@pytest.mark.parametrize("path", sources("kernels", "models", "parallel", "nodes"), ids=str)
def test_nothing_imports_the_launcher_and_only_nodes_import_nodes(path: Path) -> None:
    forbidden = ("launch",) if path.parent.name == "nodes" else ("launch", "nodes")
    names = {name for name in imported(path) if name.split(".")[0] in forbidden}
    assert not names, f"{path.name} imports {sorted(names)}"


@pytest.mark.parametrize("path", sources("nodes"), ids=str)
def test_differences_between_hosts_live_in_one_module(path: Path) -> None:
    """flow_model and comfy_host use what all their hosts have; everything else goes through host_compat."""
    if path.stem not in ("host_compat", "comfy_host", "flow_model"):
        assert not {name for name in imported(path) if name.split(".")[0] in HOST_MODULES}


@pytest.mark.parametrize("path", sources("nodes"), ids=str)
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"
