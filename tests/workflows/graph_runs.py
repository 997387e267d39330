"""Graphs of this pack and what a user on rank 0 does with them; shared by the tests on four ranks."""

from __future__ import annotations

import io
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from server_client import Client, Graph, Run

from phase_parallel.launch.running import Launch

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
OTHER_GOLDEN = Path(os.environ.get("GOLDEN_DIR") or ROOT.parent / "shared" / "golden")
"""The whole set; it may not be there."""

LEVELS = 1.01
"""Of 255: SaveImage cuts to 8 bits, and a sum in another order may fall to the other side of a whole number.
"""


def graph_of(stem: str, folder: str, changes: dict[str, dict[str, Any]]) -> Graph:
    """The API-format workflow with the checkpoint `folder` and with inputs changed, by class of the node."""
    graph: Graph = json.loads((ROOT / "workflows" / "api" / f"{stem}.api.json").read_text())
    changes = {"HunyuanImage3Loader": {"folder": folder}} | changes
    for node in graph.values():
        node["inputs"] |= changes.get(node["class_type"], {})
    missing = set(changes) - {node["class_type"] for node in graph.values()}
    assert not missing, f"{stem} has no {', '.join(missing)}"
    return graph


def nodes_of(graph: Graph, kind: str) -> list[str]:
    """Ids of the nodes of a class, in the order of the file."""
    return [key for key, node in graph.items() if node["class_type"] == kind]


def node_of(graph: Graph, kind: str) -> str:
    (key,) = nodes_of(graph, kind)
    return key


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Of two pictures, in levels of 255."""
    assert got.shape == want.shape
    return float(np.abs(got.astype(np.float64) - want).max())


def metadata(graph: dict[str, Any]) -> dict[str, Any]:
    """What this pack wrote into the graph of a saved picture."""
    notes = [node.get("_meta", {}).get("phase_parallel") for node in graph.values()]
    (found,) = [note for note in notes if note is not None]
    return found


def png(pixels: np.ndarray) -> bytes:
    """pixels: [H, W, 3] uint8."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


class User:
    """Someone at rank 0's page."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.client = Client(launch.url)

    @cached_property
    def node_names(self) -> set[str]:
        return self.client.node_names()

    @property
    def sees_text(self) -> bool:
        """Whether this host shows text on a node while it runs (it came later than the PreviewAny node)."""
        return "PreviewAny" in self.node_names

    def run(self, graph: Graph) -> Run:
        """Run to the end; an error fails the test with the log of the ranks."""
        run = self.client.run(graph)
        assert run.error is None, f"{run.error}\n{self.launch.last_lines(40)}"
        return run

    def draw(self, graph: Graph) -> tuple[np.ndarray, dict[str, Any], Run]:
        """Picture [H, W, 3] uint8, the pack's metadata in it, and the run."""
        run = self.run(graph)
        picture, inside = self.client.picture(run)
        return picture, metadata(inside), run

    def shown(self, graph: Graph, run: Run, kind: str) -> str:
        """The text output of the node of that class."""
        (text,) = run.outputs[node_of(graph, kind)]["text"]
        return text
