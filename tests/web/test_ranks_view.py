"""The view of the ranks in a real browser, on a server that tells whatever the test wants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from browser import Browser, Page

from phase_parallel.nodes.status_routes import PAGE_FILES
from phase_parallel.parallel.plan import make_plan
from phase_parallel.parallel.rank_record import RankRecord, RecordKeeper

WEB = Path(__file__).resolve().parents[2] / "web"
HOSTILE = "<img src=x onerror=\"document.body.dataset.broken = 'yes'\"> & <script>document.body.dataset.broken = 'yes'</script>"


def record(rank: int, **changes: Any) -> dict[str, Any]:
    keeper = RecordKeeper(RankRecord(rank, 100 + rank, "here", "", "cpu"))
    keeper.take_place(make_plan("hybrid", world_size=4, rank=rank), 1)
    return keeper.to_json() | changes


class RankZero:
    """Answers as rank 0 does, with ``ranks``; while ``away`` is set it answers with an error."""

    def __init__(self) -> None:
        self.ranks: list[dict[str, Any] | None] = [record(rank) for rank in range(4)]
        self.plan = "hybrid: AR TP4"
        self.away = False
        self.asked: list[tuple[float, str]] = []
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> RankZero:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def times(self, path: str) -> list[float]:
        return [moment for moment, asked in self.asked if asked.startswith(path)]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/phase_parallel/ui", self._file)
        for name in PAGE_FILES:
            app.router.add_get(f"/phase_parallel/ui/{name}", self._file)
        app.router.add_get("/phase_parallel/status", self._status)
        app.router.add_get("/phase_parallel/logs", self._logs)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _file(self, request: web.Request) -> web.FileResponse:
        name = request.path.rpartition("/")[2]
        return web.FileResponse(WEB / ("ranks.html" if name == "ui" else name))

    async def _status(self, request: web.Request) -> web.Response:
        self.asked.append((time.monotonic(), request.path_qs))
        if self.away:
            return web.json_response({}, status=502)
        status = {"launch_id": "a", "world_size": len(self.ranks), "plan": self.plan, "at": time.time(), "silent": [3], "ranks": self.ranks}
        return web.json_response(status)

    async def _logs(self, request: web.Request) -> web.Response:
        self.asked.append((time.monotonic(), request.path_qs))
        return web.json_response({"rank": 1, "lines": ["it begins", HOSTILE]})


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture
def server() -> Iterator[RankZero]:
    with RankZero() as running:
        yield running


def shown(browser: Browser, server: RankZero) -> Page:
    page = browser.open(f"{server.url}/phase_parallel/ui")
    page.wait("document.querySelectorAll('article').length === 4", 30)
    return page


def field(page: Page, rank: int, name: str) -> str:
    return page.value(f"document.querySelectorAll('article')[{rank}].querySelector('[data-field=\"{name}\"]').textContent")


def test_every_rank_with_all_that_is_known(browser: Browser, server: RankZero) -> None:
    memory = {"resident_set": 2e9, "resident_peak": 3e9, "host_total": 24e9}
    gpu = {"device_allocated": 40e9, "device_reserved": 41e9, "device_peak": 52e9, "device_free": 90e9, "device_total": 143e9}
    server.ranks[1] = record(
        1, device_name="NVIDIA H200 (GPU 2)", phase="denoise", done=3, total=50, memory=memory | gpu, tokens=101, tokens_per_s=402.31, text_at=0.0,
        text_path="one CUDA graph a token", steps=1, s_per_step=0.514, picture_at=time.time(), error="it broke", error_at=0.0,
    )  # fmt: skip
    server.ranks[2] = None
    page = shown(browser, server)
    card = page.value("document.querySelectorAll('article')[1].innerText")
    assert "Rank 1" in card and "NVIDIA H200 (GPU 2)" in card
    assert field(page, 1, "Phase") == "denoise 3/50"
    assert field(page, 1, "Place") == "shard 1, replica 0; AR TP 2 of 4; denoise TP 1 of 2 × SP 0 of 2"
    assert field(page, 1, "Memory") == "40.0 of 143.0 GB, peak 52.0 GB, 90.0 GB free"
    assert field(page, 1, "Process") == "101 on here, 2.0 GB, peak 3.0 GB"
    assert field(page, 1, "Last text").startswith("101 tokens, 402.3 tokens/s, ") and field(page, 1, "Text by") == "one CUDA graph a token"
    assert field(page, 1, "Last picture").startswith("1 step, 0.51 s/step, ")
    assert page.value("document.querySelectorAll('article')[1].querySelector('.pp-error').textContent").endswith(": it broke")
    assert field(page, 3, "Phase") == "idle (silent)"
    assert "not started" in page.value("document.querySelectorAll('article')[2].innerText")
    assert page.value("document.querySelector('.pp-plan').textContent") == "Plan hybrid: AR TP4"
    assert page.value("document.querySelector('.pp-state').textContent") == "4 ranks, 1 at work, 1 not started, silent: 3"
    # Without a memory of its own the process's counts.
    assert " GB, peak " in field(page, 0, "Memory") and field(page, 0, "Last text") == field(page, 0, "Last picture") == "none"
    spoken = page.spoken()
    assert [name for role, name in spoken if role == "article"] == ["Rank 0", "Rank 1", "Rank 2", "Rank 3"]
    assert [name for role, name in spoken if role == "progressbar"] == ["Progress of rank 1"]
    assert page.errors == [] and {url.split("/phase_parallel/")[0] for url in page.requests if not url.startswith("data:")} == {server.url}


def test_it_follows_the_ranks_once_a_second_and_rests_while_hidden(browser: Browser, server: RankZero) -> None:
    page = shown(browser, server)
    server.ranks[0] = record(0, phase="AR", done=7, total=100, unit="token")
    page.wait("document.querySelector('[data-field=Phase]').textContent === 'AR 7/100'", 10)
    assert page.value("document.querySelector('progress').position") == pytest.approx(0.07)
    before = len(server.times("/phase_parallel/status"))
    time.sleep(3.2)
    assert 2 <= len(server.times("/phase_parallel/status")) - before <= 4
    page.value("Object.defineProperty(document, 'hidden', {value: true, configurable: true}); document.dispatchEvent(new Event('visibilitychange'))")
    time.sleep(0.3)  # what was under way
    hidden = len(server.asked)
    time.sleep(2.5)
    assert len(server.asked) == hidden
    page.value("Object.defineProperty(document, 'hidden', {value: false, configurable: true}); document.dispatchEvent(new Event('visibilitychange'))")
    time.sleep(0.7)
    assert len(server.asked) > hidden


def test_text_of_a_rank_is_never_markup(browser: Browser, server: RankZero) -> None:
    server.plan = HOSTILE
    server.ranks[1] = record(1, error=HOSTILE, error_at=time.time(), device_name=HOSTILE, phase=HOSTILE, host=HOSTILE)
    page = shown(browser, server)
    page.click("document.querySelectorAll('summary')[1]")
    page.wait("document.querySelectorAll('pre')[1].textContent.includes('it begins')", 10)
    assert page.value("document.body.innerText").count(HOSTILE) == 6, "plan, error, device, phase, host and log"
    assert page.value("document.querySelectorAll('main img, main script').length") == 0
    assert page.value("document.body.dataset.broken") is None
    assert "innerHTML" not in "".join(path.read_text() for path in WEB.glob("ranks*"))


def test_the_log_of_a_rank_is_fetched_while_it_is_open(browser: Browser, server: RankZero) -> None:
    page = shown(browser, server)
    time.sleep(1.2)
    assert server.times("/phase_parallel/logs") == []
    page.click("document.querySelectorAll('summary')[1]")
    page.wait("document.querySelectorAll('pre')[1].textContent.startsWith('[rank 1] it begins\\n[rank 1] ')", 10)
    assert {asked for _, asked in server.asked if "logs" in asked} == {"/phase_parallel/logs?rank=1&lines=200"}
    page.click("document.querySelectorAll('summary')[1]")
    time.sleep(0.3)
    closed = len(server.times("/phase_parallel/logs"))
    time.sleep(1.5)
    assert len(server.times("/phase_parallel/logs")) == closed


def test_it_says_when_rank_0_is_away_and_goes_on_when_it_is_back(browser: Browser, server: RankZero) -> None:
    page = shown(browser, server)
    server.away = True
    page.wait("document.querySelector('[role=status]').textContent.startsWith('Rank 0 does not answer. What you see is of ')", 10)
    assert page.value("document.querySelectorAll('article').length") == 4, "the last state stays"
    server.away = False
    page.wait("document.querySelector('[role=status]').textContent === '4 ranks, idle, silent: 3'", 10)


def test_colours_are_the_themes(browser: Browser, server: RankZero) -> None:
    page = shown(browser, server)
    page.value("document.documentElement.style.setProperty('--fg-color', 'rgb(1, 2, 3)')")
    page.value("document.documentElement.style.setProperty('--comfy-menu-bg', 'rgb(4, 5, 6)')")
    page.wait("getComputedStyle(document.querySelector('.phase-parallel-ranks')).color === 'rgb(1, 2, 3)'", 10)
    assert page.value("getComputedStyle(document.querySelector('article')).backgroundColor") == "rgb(4, 5, 6)"
