"""Prints what the fault tests found as one table at the end of the run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "workflows"):
    sys.path.append(str(folder))

from fault_cell import Cell  # noqa: E402 - the folder must be on the path first

_cells = pytest.StashKey[list[Cell]]()


@pytest.fixture(scope="session")
def cells(request: pytest.FixtureRequest) -> list[Cell]:
    """Each test of a fault appends its cell."""
    return request.config.stash.setdefault(_cells, [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash.get(_cells, [])
    if not found:
        return
    terminalreporter.section("faults")
    for cell in found:
        line = f"{cell.fault:<13} {cell.phase:<10} rank {cell.rank}  {cell.seconds:5.1f} s  next prompt {cell.next_prompt:<9}  {cell.sentence}"
        terminalreporter.write_line(line)
