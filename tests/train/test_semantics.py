"""What the shipped mini checkpoint draws, under every plan: what was asked for, and the same picture. And a fault in the parallel parts is seen in it,
which shows that the judge can fail.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from semantics import PLANS, Gallery, gallery, psnr

from phase_parallel.train.mini_folder import mini_folder
from phase_parallel.train.suites import Suite

pytestmark = [pytest.mark.ranks4, pytest.mark.timeout(1800)]
LEAST_ACCURACY, LEAST_OF_EDITS, MOST_WITH_A_FAULT, LEAST_PSNR = 0.95, 0.9, 0.7, 40.0
# Where each fault shows: a rank's place differs from its number only in the text of plan hybrid, and so does its micro shard.
FAULTS: dict[str, tuple[str, Suite]] = {
    "skipped reduction": ("tp4", "t2i"),
    "swapped micros": ("hybrid-sp", "t2i"),
    "physical order": ("hybrid-sp", "think"),
}


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    """Of the shipped checkpoint."""
    with gallery(mini_folder("instruct", tmp_path_factory.mktemp("shipped_mini")), tmp_path_factory.mktemp("pictures")) as opened:
        yield opened


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_draws_what_was_asked_for(plan: str, mini: Gallery) -> None:
    drawn = mini.draw(plan, "t2i")
    assert drawn.accuracy >= LEAST_ACCURACY, drawn.sentences


@pytest.mark.parametrize("plan", [name for name in PLANS if name != "single"])
def test_every_plan_draws_the_same_picture(plan: str, mini: Gallery) -> None:
    pairs = zip(mini.draw("single", "t2i").pictures, mini.draw(plan, "t2i").pictures, strict=True)
    assert min(psnr(one, other) for one, other in pairs) >= LEAST_PSNR


def test_what_is_written_is_drawn(mini: Gallery) -> None:
    drawn = mini.draw("hybrid-sp", "think")
    assert drawn.accuracy >= LEAST_ACCURACY, drawn.sentences


def test_the_words_decide_the_proportions(mini: Gallery) -> None:
    assert mini.draw("hybrid-cfg", "ratio").accuracy >= LEAST_ACCURACY


@pytest.mark.parametrize("suite", ["edit1", "edit2"])
def test_edits_are_drawn(suite: Suite, mini: Gallery) -> None:
    drawn = mini.draw("hybrid-cfg", suite)
    assert drawn.accuracy >= LEAST_OF_EDITS, drawn.sentences


def test_distil_draws_in_eight_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = mini_folder("distil", tmp_path_factory.mktemp("shipped_distil"))
    with gallery(folder, tmp_path_factory.mktemp("distil_pictures"), steps=8) as opened:
        drawn = opened.draw("hybrid-sp", "distil")
    assert drawn.accuracy >= LEAST_ACCURACY, drawn.sentences


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_in_the_pictures(fault: str, mini: Gallery) -> None:
    plan, suite = FAULTS[fault]
    assert mini.draw(plan, suite).accuracy >= LEAST_ACCURACY, "without the fault all is well"
    assert mini.draw(plan, suite, fault).accuracy < MOST_WITH_A_FAULT


@pytest.fixture(scope="module")
def random_gallery(random_mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    with gallery(random_mini, tmp_path_factory.mktemp("random_pictures"), steps=1, count={"t2i": 1, "think": 1}) as opened:
        yield opened


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_really_planted(fault: str, random_gallery: Gallery) -> None:
    """With random weights too: other texts or pictures come out, and the ranks have the same ones only without the fault."""
    plan, suite = FAULTS[fault]
    right, wrong = random_gallery.draw(plan, suite), random_gallery.draw(plan, suite, fault)
    assert len(set(right.digests)) == 1
    assert wrong.digests[0] != right.digests[0]


def test_plans_agree_on_random_pictures_too(random_gallery: Gallery) -> None:
    one, other = (random_gallery.draw(plan, "t2i").pictures[0] for plan in ("single", "hybrid-cfg"))
    assert psnr(one, other) >= LEAST_PSNR


def test_psnr_knows_pictures_apart() -> None:
    black = np.zeros((4, 4, 3), np.uint8)
    assert psnr(black, black) == float("inf") and psnr(black, black + 255) == 0 and 47 < psnr(black, black + 1) < 49
