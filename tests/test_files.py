"""The repository stays light and readable."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 300
MAX_REPOSITORY_BYTES = 24 << 20
MAX_GOLDEN_BYTES = 6 << 20
MACHINE_PATH = re.compile(r"(^|[^A-Za-z.])/(home|root|mnt|work)/[a-z]")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def code() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests"]


def test_repository_stays_light() -> None:
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in tracked()}
    assert sum(sizes.values()) <= MAX_REPOSITORY_BYTES
    golden = sum(size for path, size in sizes.items() if path.parts[:2] == ("tests", "golden"))
    assert 0 < golden <= MAX_GOLDEN_BYTES


def test_one_module_one_idea() -> None:
    long = {}
    for path in code():
        name, lines = str(path.relative_to(ROOT)), len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            long[name] = lines
    assert not long


def test_functions_fit_on_a_screen() -> None:
    long = []
    for path in code():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "INPUT_TYPES":
                lines = node.end_lineno - node.lineno + 1
                if lines > 70:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {lines}")
    assert not long


def test_every_package_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in code()
        if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert not silent


def test_no_paths_of_one_machine() -> None:
    found = []
    for path in tracked():
        if path.suffix in (".py", ".md", ".sh", ".toml", ".json", ".txt", "") and path.stat().st_size < 1 << 20:
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), start=1):
                if MACHINE_PATH.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found
