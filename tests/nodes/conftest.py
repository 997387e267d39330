"""A checkpoint handle with a recording stand-in for the driver: what nodes would have asked of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from phase_parallel.nodes.engine_handle import EngineChoice, EngineHandle
from phase_parallel.nodes.text_socket import HunyuanText
from phase_parallel.nodes.vae_socket import HunyuanVae
from phase_parallel.parallel.plan import make_plan

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CHECKPOINTS = GOLDEN / "checkpoints"


@dataclass
class Calls:
    """Stands for the driver. Answers have the right shapes; `text` is what the text operation answers."""

    text: dict[str, Any] = field(
        default_factory=lambda: {
            "legal": None,
            "cot_text": None,
            "recaption": None,
            "height": 352,
            "width": 160,
            "truncated": False,
            "answer": "",
            "tokens": [1],
            "measured": {"decode": "eager: no CUDA device", "reduction": "one rank: nothing to reduce", "decode_seconds": 1.0},
        }
    )
    keys: list[str] = field(default_factory=list)
    """What the encoding of pictures answers."""
    events: list[dict[str, Any]] = field(default_factory=list)
    made: list[tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = field(default_factory=list)

    def call(
        self, op: str, args: dict[str, Any], tensors: Any = None, *, report: Any = None, **_: Any
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        name = op.rpartition(".")[2]
        self.made.append((name, args, tensors or {}))
        for event in self.events if report else ():
            report(event)
        if name == "generate_text":
            return self.text, {}
        if name == "encode_references":
            return {"keys": self.keys or args["expected_keys"]}, {}
        if name == "denoise":
            return {}, {"velocity": torch.zeros(len(args["rows"]), *tensors["latents"].shape[1:])}
        if name == "sample":
            shape = (len(args["seeds"]), 16, args["height"] // 16, args["width"] // 16)
            return {}, {"latents": torch.zeros(shape)}
        return {}, {}

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.made]


@pytest.fixture
def calls() -> Calls:
    return Calls()


def make_engine(calls: Calls, *, weight_dtype: str = "auto") -> EngineHandle:
    choice = EngineChoice(
        folder=str(CHECKPOINTS / "tiny-base"),
        plan=make_plan("single", world_size=1),
        weight_dtype=weight_dtype,
        moe_layout="micro_major",
        moe_path="multi_micro",
    )
    return EngineHandle(choice, calls)


@pytest.fixture
def engine(calls: Calls) -> EngineHandle:
    return make_engine(calls)


@pytest.fixture
def other_engine(calls: Calls) -> EngineHandle:
    """The same folder in another precision: another engine."""
    return make_engine(calls, weight_dtype="bf16")


@pytest.fixture
def clip(engine: EngineHandle) -> HunyuanText:
    return HunyuanText(engine)


@pytest.fixture
def vae(engine: EngineHandle) -> HunyuanVae:
    return HunyuanVae(engine)


@pytest.fixture
def golden_wide() -> Path:
    """Folder of the golden case with four steps."""
    return GOLDEN / "cases" / "base_t2i_wide_cfg"
