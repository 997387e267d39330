"""What the tests of Instruct graphs on four ranks have in common."""

from __future__ import annotations

import re

import numpy as np
from graph_runs import User, nodes_of
from server_client import Graph

SMALL, DISTIL = "small-instruct", "small-distil"
GREEDY = {"do_sample": "greedy", "max_new_tokens": 64}
WRITTEN = "<think>quick.</think><recaption>a dog!</recaption>"
"""What the small checkpoint greedily writes about anything."""
SAVED = re.compile(r"(\d+) of (\d+) prompt tokens reused from the model's text, (\d+) computed")


def pixels(seed: int, height: int = 128, width: int = 192) -> np.ndarray:
    """A reference picture [H, W, 3] uint8."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def load_images(user: User, graph: Graph, pictures: list[bytes]) -> None:
    """Put the pictures into the graph's Load Image nodes in order."""
    for number, (node, content) in enumerate(zip(nodes_of(graph, "LoadImage"), pictures, strict=True)):
        name = f"phase_parallel_reference_{number}.png"
        user.client.upload(name, content)
        graph[node]["inputs"]["image"] = name


def system_prompt(text: str | None) -> dict[str, str]:
    return {"system_prompt": "None" if text is None else "custom", "custom_system_prompt": text or ""}


def saving(texts: list[str]) -> tuple[int, int]:
    """(reused, all) prompt tokens, as the user reads it on the node that draws."""
    (found,) = [match for text in texts if (match := SAVED.search(text))]
    reused, total, computed = map(int, found.groups())
    assert reused + computed == total
    return reused, total
