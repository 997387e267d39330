"""Runs of one engine that are denoised in other ways by turns: each is the picture of a plan that knows that way only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import engine_of
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3.engine import Engine, ImageRequest
from phase_parallel.models.hunyuan_image_3.sequence import build_image_rows
from phase_parallel.models.hunyuan_image_3.text_generation import TextRequest
from phase_parallel.models.hunyuan_image_3.topology_choice import DenoiseWay
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan

PROMPT = "two pears on a blue table"
ULYSSES, GATHER, BRANCHES, ONE_GROUP = (
    DenoiseWay("sp", "ulysses"), DenoiseWay("sp", "kv_gather"), DenoiseWay("cfg", "ulysses"), DenoiseWay("tp", "ulysses")
)  # fmt: skip
WAYS = {"ulysses": ULYSSES, "gather": GATHER, "branches": BRANCHES, "one group": ONE_GROUP, "serial": DenoiseWay("sp", "ulysses", "serial")}


def write_text(engine: Engine) -> None:
    engine.generate_text(TextRequest(PROMPT, None, None, "img_ratio", need_ratio=True, max_new_tokens=1))


def draw(engine: Engine, guidance: float) -> torch.Tensor:
    rows = build_image_rows(
        engine.tokenizer, engine.config, prompt=PROMPT, system_prompt=None, cot_text=None, cond_images=(), height=128, width=432
    )
    return engine.sample(ImageRequest(rows, steps=2, guidance=guidance, flow_shift=3.0, seeds=(3,)))


@pytest.fixture(scope="module")
def fixed(eight_ways: Path) -> dict[tuple[str, float], torch.Tensor]:
    """Pictures of engines that never go another way."""
    found = {}
    for name, way in WAYS.items():
        def body(plan: ParallelPlan, comm: Communicator, way: DenoiseWay = way) -> list[torch.Tensor]:
            pictures = []
            for guidance in (4.0, 1.0):
                engine = engine_of(eight_ways, plan, comm, cfg_mode=way.cfg)
                write_text(engine)
                pictures.append(draw(engine, guidance))
            return pictures

        found[name, 4.0], found[name, 1.0] = run_ranks(body, "hybrid", world_size=4, denoise=way.denoise, attention=way.attention)[0]
    return found


@pytest.mark.parametrize(
    "turns",
    [
        [("branches", 4.0), ("gather", 1.0), ("branches", 4.0)],  # what auto does with guidance on, off and on
        [("gather", 1.0), ("branches", 4.0), ("ulysses", 1.0), ("gather", 1.0)],
        [("ulysses", 4.0), ("branches", 4.0), ("ulysses", 4.0)],  # goes on in the text's own cache before and after
        [("one group", 4.0), ("ulysses", 4.0), ("one group", 4.0), ("branches", 1.0)],
        [("ulysses", 4.0), ("serial", 4.0), ("ulysses", 4.0)],
    ],
    ids=lambda turns: " ".join(f"{name}@{guidance:g}" for name, guidance in turns),
)
@pytest.mark.parametrize("start", ["ulysses", "branches"])
def test_every_turn_is_the_picture_of_its_way(start: str, turns: list, eight_ways: Path, fixed: dict) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> list[torch.Tensor]:
        engine = engine_of(eight_ways, plan, comm)
        write_text(engine)
        pictures = []
        for name, guidance in turns:
            engine.denoise_as(WAYS[name])
            pictures.append(draw(engine, guidance))
        return pictures

    way = WAYS[start]
    for pictures in run_ranks(body, "hybrid", world_size=4, denoise=way.denoise, attention=way.attention):
        for (name, guidance), picture in zip(turns, pictures, strict=True):
            assert torch.equal(picture, fixed[name, guidance]), (name, guidance)


def test_a_switch_moves_no_weight(eight_ways: Path) -> None:
    def places(engine: Engine) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in engine.model.resident.items()}

    def body(plan: ParallelPlan, comm: Communicator) -> None:
        engine = engine_of(eight_ways, plan, comm)
        before = places(engine)
        whole = engine.model.weights["denoise"]
        for name in ("branches", "one group", "gather", "ulysses"):
            engine.denoise_as(WAYS[name])
            draw(engine, 4.0)
            assert engine.model.weights["denoise"] is (engine.model.weights["prefill"] if name == "one group" else whole)
        assert places(engine) == before and engine.model.plan == plan

    run_ranks(body, "hybrid", world_size=4)


def test_prefixes_of_each_way_are_kept(eight_ways: Path) -> None:
    """Going back computes no prefix again."""

    def body(plan: ParallelPlan, comm: Communicator) -> bool:
        engine = engine_of(eight_ways, plan, comm)
        for name, guidance in (("branches", 4.0), ("gather", 1.0)):
            engine.denoise_as(WAYS[name])
            draw(engine, guidance)
        engine.model.prefill = None  # nobody may call it
        try:
            engine.denoise_as(BRANCHES)
            return bool(draw(engine, 4.0).isfinite().all())
        finally:
            del engine.model.prefill

    assert all(run_ranks(body, "hybrid", world_size=4))


def test_ranks_that_go_other_ways_differ_in_their_ledgers(eight_ways: Path) -> None:
    def body(plan: ParallelPlan, comm: Communicator) -> tuple[int, ...]:
        engine = engine_of(eight_ways, plan, comm)
        engine.denoise_as(BRANCHES if plan.rank == 3 else GATHER)
        return tuple(comm.ledger.digest())

    first, *same, odd = run_ranks(body, "hybrid", world_size=4)
    assert all(digest == first for digest in same) and odd != first
