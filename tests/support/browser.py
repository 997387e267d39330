"""A real headless Chromium, driven over its own debugging protocol; nothing has to be installed for that but Chromium itself."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_S = 60.0
ANSWER_S = 60.0
POLL_S = 0.1


def find_chromium() -> str:
    """Its executable; where there is none the test is skipped."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed here (on Debian: apt-get install chromium), so no page can be looked at")
    return found


class Browser:
    """`with Browser(folder) as browser: page = browser.open(url)`. ``folder``: of this test alone, for the profile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages: list[Page] = []

    def __enter__(self) -> Browser:
        # As root, which test machines often are, Chromium needs --no-sandbox; it only visits our own pages.
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1600,1000", "--lang=en"]
        log = (self._folder / "chromium.txt").open("wb")
        self._process = subprocess.Popen(
            [find_chromium(), *options, "--remote-debugging-port=0", f"--user-data-dir={self._folder / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()
        try:
            self._address = f"127.0.0.1:{self._port()}"
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for page in self._pages:
            page.close()
        self._end()

    def open(self, url: str) -> Page:
        page = Page(self._ask("PUT", "/json/new?about:blank")["webSocketDebuggerUrl"])
        self._pages.append(page)
        page.go(url)
        return page

    def opened(self, url: str) -> Page:
        """The tab that a page has opened with that address; it may take a moment."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            for tab in self._ask("GET", "/json/list"):
                if tab["url"] == url:
                    self._pages.append(Page(tab["webSocketDebuggerUrl"]))
                    return self._pages[-1]
            time.sleep(POLL_S)
        raise AssertionError(f"no page has opened {url}")

    def _port(self) -> int:
        file, deadline = self._folder / "profile" / "DevToolsActivePort", time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(FileNotFoundError, IndexError, ValueError):
                return int(file.read_text().splitlines()[0])
            time.sleep(POLL_S)
        raise AssertionError(f"Chromium did not start:\n{(self._folder / 'chromium.txt').read_text(errors='replace')[-2000:]}")

    def _ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(f"http://{self._address}{path}", method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=ANSWER_S) as answer:
            return json.load(answer)

    def _end(self) -> None:
        # Its helper processes are of its session and are not told by it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Page:
    """One tab. ``requests``: every address that it asked for; ``errors``: exceptions that nothing caught, in words."""

    def __init__(self, debugger: str) -> None:
        self._socket = websocket.create_connection(debugger, timeout=ANSWER_S, suppress_origin=True, http_no_proxy=["127.0.0.1"])
        self._number = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "DOM", "Accessibility"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._socket.close()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def go(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def look(self) -> None:
        """Bring the tab to the front: a page in the background draws nothing."""
        self.send("Page.bringToFront")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression, or the promise that it is, gives; an exception fails the test."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True)
        problem = answer.get("exceptionDetails")
        assert problem is None, f"{expression}: {problem.get('exception', problem).get('description', problem)}"
        return answer["result"].get("value")

    def wait(self, expression: str, limit_s: float = 60.0, doing: Callable[[], str] = lambda: "") -> Any:
        """The first true value of the expression (True for an element). ``doing``: what to say where it never comes."""
        deadline = time.monotonic() + limit_s
        while True:
            found = self.value(f"(async () => {{ const found = await ({expression}); return found instanceof Node ? true : found; }})()")
            if found:
                return found
            assert time.monotonic() < deadline, f"not true within {limit_s:g} s: {expression}\n{self.errors}\n{doing()}"
            time.sleep(POLL_S)

    def click(self, element: str) -> None:
        """With the mouse, in the middle of the element that the expression gives, once it is there and nothing covers it."""
        place = self.wait(
            f"""(() => {{
                const element = {element};
                if (!element) return null;
                element.scrollIntoView({{block: "nearest"}});
                const box = element.getBoundingClientRect();
                const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
                const top = document.elementFromPoint(x, y);
                return box.width && (element.contains(top) || top?.contains(element)) ? [x, y] : null;
            }})()"""
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], **button)

    def press_escape(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key="Escape", code="Escape", windowsVirtualKeyCode=27)

    def choose_file(self, selector: str, path: Path) -> None:
        """As the system's file dialog does."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        assert node, f"the page has no {selector}"
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def spoken(self) -> list[tuple[str, str]]:
        """(role, name) of what a screen reader finds, in order."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]

    def picture(self, path: Path) -> None:
        self.look()
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message["method"] == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
