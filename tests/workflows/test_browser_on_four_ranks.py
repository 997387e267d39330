"""A person at the real page of a real ComfyUI on four ranks: load a shipped workflow, run, cancel, run again, look at the ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from browser import Browser, find_chromium
from comfy_page import ComfyPage
from graph_runs import ROOT
from PIL import Image

from phase_parallel.launch.running import Launch

pytestmark = [pytest.mark.host, pytest.mark.ranks4]
GENERATE, LOADER, SAVE = "HunyuanImage3Generate", "HunyuanImage3Loader", "SaveImage"


@pytest.fixture(scope="session", autouse=True)
def chromium() -> None:
    """Asked for before the ranks, which would start for nothing; only as early as they because of its scope."""
    find_chromium()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as running:
        yield running


@pytest.mark.timeout(1200)
def test_a_person_runs_cancels_runs_again_and_looks_at_the_ranks(browser: Browser, launch: Launch, tmp_path: Path) -> None:
    comfy = ComfyPage(browser, launch.url)
    try:
        visit(comfy, launch)
    except AssertionError:
        comfy.page.picture(tmp_path / "page.png")
        print(f"the page as it was: {tmp_path / 'page.png'}\n{launch.last_lines(40)}")
        raise


def of_all_ranks(field: str) -> str:
    """JavaScript for the texts of a field of the cards."""
    return f"[...document.querySelectorAll('article [data-field=\"{field}\"]')].map((at) => at.textContent)"


def visit(comfy: ComfyPage, launch: Launch) -> None:
    before = set(launch.output_folder.glob("*.png"))
    comfy.load(ROOT / "workflows" / "t2i_generate.json", GENERATE)
    comfy.choose(LOADER, "folder", "tiny-base")
    comfy.choose(GENERATE, "steps", 1000)
    comfy.run()
    comfy.wait_for_progress(GENERATE, 3, 180)
    shares = comfy.progress(GENERATE)
    assert shares == sorted(shares) and shares[0] < shares[-1] < 1
    ranks = comfy.open_ranks()
    ranks.wait(f"{of_all_ranks('Phase')}.filter((text) => /^denoise \\d+\\/1000$/.test(text)).length === 4", 60)
    assert [name for role, name in ranks.spoken() if role == "article"] == ["Rank 0", "Rank 1", "Rank 2", "Rank 3"]
    places = ranks.value(of_all_ranks("Place"))
    assert len(set(places)) == 4 and all(place.startswith("shard ") for place in places)
    comfy.page.look()
    comfy.cancel()
    asked = time.monotonic()
    comfy.wait_for("execution_interrupted", 30)
    assert time.monotonic() - asked < 15 and set(launch.output_folder.glob("*.png")) == before

    comfy.choose(GENERATE, "steps", 4)
    comfy.run()
    comfy.wait_for("executed", 120)
    comfy.page.wait(f"the({SAVE!r}).imgs?.[0]?.naturalWidth", 60, comfy.news)
    (saved,) = set(launch.output_folder.glob("*.png")) - before
    with Image.open(saved) as picture:
        assert list(picture.size) == comfy.page.value(f"[the({SAVE!r}).imgs[0].naturalWidth, the({SAVE!r}).imgs[0].naturalHeight]")
    # The panel follows by itself; a page of its own, once it is seen again.
    ranks.look()
    ranks.wait(f"{of_all_ranks('Last picture')}.filter((text) => text.startsWith('4 steps, ')).length === 4", 30)
    ranks.wait("document.querySelector('.pp-state').textContent === '4 ranks, idle'", 30)
    assert ranks.value("document.querySelector('.pp-plan').textContent").startswith("Plan hybrid: AR TP4")
    ranks.click("document.querySelectorAll('article summary')[3]")
    ranks.wait("document.querySelectorAll('article pre')[3].textContent.includes('[rank 3] ')", 30)
    assert comfy.page.errors == [] and ranks.errors == []


@pytest.mark.timeout(600)
def test_the_side_panel_asks_for_nothing_once_it_is_closed(browser: Browser, launch: Launch) -> None:
    comfy = ComfyPage(browser, launch.url)
    if not comfy.has_side_bar:
        pytest.skip("this ComfyUI has no side bar; set COMFYUI_DIR to a newer one")
    ranks = comfy.open_ranks()
    ranks.wait("document.querySelectorAll('article').length === 4", 30)
    comfy.close_ranks()
    ranks.wait("document.querySelectorAll('article').length === 0", 30)
    ranks.requests.clear()
    time.sleep(2.5)
    ranks.value("1")  # takes up what has come in
    assert [url for url in ranks.requests if "phase_parallel" in url] == []


# What the page draws: a node is at least as large as its widgets need, whatever the file says.
BOXES = """app.graph._nodes.map((node) => {
    const needed = node.computeSize();
    return [node.type, node.pos[0], node.pos[1], Math.max(node.size[0], needed[0]), Math.max(node.size[1], needed[1])];
})"""
TITLE_BAR = 30


@pytest.mark.timeout(600)
def test_no_node_of_a_shipped_workflow_covers_another(browser: Browser, launch: Launch) -> None:
    comfy = ComfyPage(browser, launch.url)
    if not comfy.has_side_bar:
        pytest.skip("this ComfyUI does not know all nodes of the workflows; set COMFYUI_DIR to a newer one")
    covered = []
    for workflow in sorted((ROOT / "workflows").glob("*.json")):
        comfy.page.value("app.graph.clear()")
        comfy.load(workflow, LOADER)
        for first, second in combinations(comfy.page.value(BOXES), 2):
            (kind, x, y, width, height), (other, other_x, other_y, other_width, other_height) = first, second
            beside = x + width <= other_x or other_x + other_width <= x
            if not beside and y + height > other_y - TITLE_BAR and other_y + other_height > y - TITLE_BAR:
                covered.append(f"{workflow.stem}: {kind} at {y:g} to {y + height:g} and {other} at {other_y:g}")
    assert covered == []
