"""Golden data for the tests of this folder: where it lies, how a case is read, how a tensor is compared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config

REPOSITORY = Path(__file__).resolve().parents[2]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """max|got - expected| / max|expected|, the metric of the golden data."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    got, expected = got.double(), expected.double()
    return ((got - expected).abs().max() / expected.abs().max()).item()


@dataclass(frozen=True)
class GoldenCase:
    folder: Path
    spec: dict[str, Any] = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)

    def check(self, name: str, got: Tensor) -> None:
        """Floats within the case's tolerance for this tensor, integers and masks exactly."""
        expected = self.tensors[name]
        if not expected.is_floating_point():
            assert torch.equal(got.to(expected.dtype), expected), f"{self.folder.name}: {name}"
            return
        rules = self.spec["tolerances"]
        exceptions = (limit for pattern, limit in rules.items() if fnmatchcase(name, pattern))
        limit = next(exceptions, rules["default"])
        error = relative_error(got, expected)
        assert error <= limit, f"{self.folder.name}: {name} is off by {error:.2e}, the limit is {limit:.0e}"


@dataclass(frozen=True)
class GoldenCheckpoint:
    folder: Path
    config: HunyuanImage3Config
    tensors: dict[str, Tensor] = field(repr=False)

    def load(self, module: nn.Module, prefix: str, *, unused: tuple[str, ...] = ()) -> nn.Module:
        """The module with the fp32 tensors below `prefix` but not below `unused`; keys must match exactly."""
        named = {
            key.removeprefix(prefix): tensor.float()
            for key, tensor in self.tensors.items()
            if key.startswith(prefix) and not key.startswith(unused)
        }
        module.load_state_dict(named, assign=True)
        return module.requires_grad_(False)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """GOLDEN_DIR, else the whole golden folder beside the checkout, else the part of it in tests/golden."""
    named = os.environ.get("GOLDEN_DIR")
    if named:
        if not Path(named).is_dir():
            pytest.fail(f"GOLDEN_DIR is {named}, which is not a folder")
        return Path(named)
    beside = REPOSITORY.parent / "shared" / "golden"
    return beside if beside.is_dir() else REPOSITORY / "tests" / "golden"


@pytest.fixture(scope="session")
def golden_case(golden_dir: Path) -> Callable[[str], GoldenCase]:
    """Reads a case by name; skips the test if this golden folder lacks it."""

    def read(name: str) -> GoldenCase:
        folder = golden_dir / "cases" / name
        if not folder.is_dir():
            pytest.skip(f"golden case {name} is not in {golden_dir}")
        spec = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        return GoldenCase(folder, spec, load_file(folder / "expected.safetensors"))

    return read


@pytest.fixture(scope="session")
def golden_checkpoint(golden_dir: Path) -> Callable[[str], GoldenCheckpoint]:
    """Reads a checkpoint by name, once a run; skips the test if this golden folder lacks it."""
    known: dict[str, GoldenCheckpoint] = {}

    def read(name: str) -> GoldenCheckpoint:
        folder = golden_dir / "checkpoints" / name
        if not folder.is_dir():
            pytest.skip(f"golden checkpoint {name} is not in {golden_dir}")
        if name not in known:
            tensors: dict[str, Tensor] = {}
            for file in sorted(folder.glob("*.safetensors")):
                tensors.update(load_file(file))
            known[name] = GoldenCheckpoint(folder, HunyuanImage3Config.from_folder(folder), tensors)
        return known[name]

    return read
