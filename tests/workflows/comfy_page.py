"""ComfyUI's own page in a browser, of March 2024 or of 2026, used as a person does: with its buttons, and by looking at the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from browser import Browser, Page

# What a person sees of a node's progress: newer pages keep it on the node, the old one draws its own for the node that runs.
WATCH = """(async () => {
    const { app } = await import("/scripts/app.js"), { api } = await import("/scripts/api.js");
    const shown = (node) => node.progress ?? (app.runningNodeId == node.id && app.progress ? app.progress.value / app.progress.max : 0);
    window.seen = {};
    window.told = [];
    setInterval(() => {
        for (const node of app.graph._nodes) {
            const share = shown(node);
            const kept = (window.seen[node.type] ??= []);
            if (share > 0 && share < 1 && kept.at(-1) !== share) kept.push(share);
        }
    }, 50);
    for (const kind of ["executed", "execution_interrupted", "execution_error"]) {
        api.addEventListener(kind, ({ detail }) => window.told.push([kind, detail]));
    }
    window.the = (type) => app.graph._nodes.find((node) => node.type === type);
})()"""

GREETING = "document.querySelector('[role=dialog]')"


class ComfyPage:
    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._url = url
        self.page = browser.open(url)
        self.page.wait("window.app?.graph && document.querySelector('#comfy-file-input') && document.querySelector('#queue-button')", 180)
        self.has_side_bar = bool(self.page.value("Boolean(app.extensionManager?.registerSidebarTab)"))
        # Either page has read its extensions once it has drawn a first graph; newer ones greet who comes first with a choice of templates instead.
        self.page.wait(f"app.graph._nodes.length || {GREETING}", 120)
        if self.page.value(f"Boolean({GREETING})"):
            self.page.press_escape()
            self.page.wait(f"!{GREETING}")
        self.page.value(WATCH)

    def load(self, workflow: Path, node: str) -> None:
        """Open a file of a graph that has a node of that class."""
        self.page.choose_file("#comfy-file-input", workflow)
        self.page.wait(f"Boolean(the({node!r}))")

    def choose(self, node: str, widget: str, value: Any) -> None:
        box = f"the({node!r}).widgets.find(({{ name }}) => name === {widget!r})"
        assert self.page.value(f"{box}.value = {value!r}") == value

    def run(self) -> None:
        self.page.value("seen = {}; told = []")
        self.page.click("document.querySelector('[data-testid=queue-button]')" if self.has_side_bar else "document.querySelector('#queue-button')")

    def cancel(self) -> None:
        if self.has_side_bar:
            self.page.click("document.querySelector('button[aria-label=\"Cancel current run\"]')")
            return
        self.page.click("document.querySelector('#comfy-view-queue-button')")
        self.page.click("[...document.querySelectorAll('.comfy-list-items button')].find((button) => button.textContent === 'Cancel')")
        self.page.click("document.querySelector('#comfy-view-queue-button')")

    def progress(self, node: str) -> list[float]:
        """Shares between 0 and 1 that this class of node has shown since the last run began."""
        return self.page.value(f"seen[{node!r}] ?? []")

    def wait_for_progress(self, node: str, count: int, limit_s: float) -> None:
        self.page.wait(f"(seen[{node!r}] ?? []).length >= {count}", limit_s, self.news)

    def wait_for(self, kind: str, limit_s: float) -> Any:
        """The message of that kind."""
        return self.page.wait(f"told.find(([name]) => name === {kind!r})?.[1]", limit_s, self.news)

    def news(self) -> str:
        return str(self.page.value("JSON.stringify([told, seen])"))

    def open_ranks(self) -> Page:
        """The page that now shows the ranks: this one with its side panel, or the one that the menu's button opened."""
        if self.has_side_bar:
            self.page.click("document.querySelector('button[aria-label^=\"Ranks\"]')")
            return self.page
        self.page.click("document.querySelector('#phase-parallel-ranks')")
        return self._browser.opened(f"{self._url}/phase_parallel/ui")

    def close_ranks(self) -> None:
        """The side panel; a page of its own stays."""
        if self.has_side_bar:
            self.page.click("document.querySelector('button[aria-label^=\"Ranks\"]')")
