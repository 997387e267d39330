"""The demo with the mini checkpoints that come with this pack: eight pictures by eight requests, and what the judge sees in them."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ..models.hunyuan_image_3.config import ConfigError, HunyuanImage3Config
from ..train.demo_wishes import DEMO_WISHES, DemoWish
from ..train.drawing import render
from ..train.errors import MiniError
from ..train.judge import judge
from ..train.mini import NAMES, Kind
from ..train.mini_folder import SHIPPED, mini_folder
from ..train.scenes import Scene, size_of
from .demo_client import connected_to, has_stock_sampling, run_prompt, saved_images, upload_image, wait_for_equal_digests
from .demo_graphs import demo_graph, graph_name
from .demo_progress import DemoProgress
from .demo_report import Made, digest_table, phase_table, save_sheet, wish_lines
from .errors import LaunchError
from .http_json import get_json
from .readiness import STATUS_ROUTE
from .running import Launch
from .shipped_models import MINI_STATE


def mini_demo(device: str, output: Path, *, ranks: int, shipped: Path = SHIPPED) -> None:
    """Raises LaunchError when a checkpoint is missing, a picture is not saved, or the ranks do not agree on one."""
    began = time.monotonic()
    try:
        folders = {kind: mini_folder(kind, MINI_STATE, shipped=shipped) for kind in NAMES}
        guidance = {kind: HunyuanImage3Config.from_folder(folder).generation.diff_guidance_scale for kind, folder in folders.items()}
    except (MiniError, ConfigError) as error:
        raise LaunchError(f"{error} `phase-parallel demo --checkpoint random` needs none.") from error
    print(f"Starting {ranks} ranks on {device} ...", flush=True)
    with Launch(ranks=ranks, device=device, models=list(folders.values()), announce=print) as launch:
        ready = time.monotonic()
        seconds: dict[str, float] = {}
        try:
            with connected_to(launch.url):
                made = _Session(launch.url, folders, guidance, output, seconds).run(DEMO_WISHES)
        except LaunchError as error:
            raise LaunchError(f"{error}\nThe last lines of the ranks:\n{launch.last_lines(30)}") from error
        finished = time.monotonic()
    sheet = save_sheet(made, output, title=f"HunyuanImage-3 Mini, made by {ranks} ranks together ({device})")
    print(f"\n{wish_lines(made)}\n\n{digest_table(made)}\n")
    print(phase_table(seconds, started=ready - began, drawn=finished - ready))
    scores = [one.verdict.score for one in made]
    right, share = sum(score.exact for score in scores), sum(score.total for score in scores) / len(scores)
    found = f"{right} of {len(made)} pictures as wanted in everything, and {share:.0%} of what was wanted"
    print(f"\nThe judge, which looks by rule and has learnt nothing, finds {found}.")
    print(f"Saved {len(made)} pictures in {output} (with their workflows inside) and {sheet}.")


class _Session:
    """Requests to rank 0, one after the other."""

    def __init__(self, url: str, folders: dict[Kind, Path], guidance: dict[Kind, float], output: Path, seconds: dict[str, float]) -> None:
        self._url, self._folders, self._guidance, self._output, self._seconds = url, folders, guidance, output, seconds
        self._stock = has_stock_sampling(url)
        self._stamp = time.strftime("%Y%m%d_%H%M%S")
        output.mkdir(parents=True, exist_ok=True)

    def run(self, wishes: Sequence[DemoWish]) -> list[Made]:
        made: list[Made] = []
        for number, wish in enumerate(wishes, start=1):
            name = graph_name(wish, stock_sampling=self._stock)
            print(f"\n{number} of {len(wishes)}, workflows/api/{name}.api.json: {wish.prompt}", flush=True)
            made.append(self._make(number, name, wish, made))
        return made

    def _make(self, number: int, name: str, wish: DemoWish, before: Sequence[Made]) -> Made:
        began = time.monotonic()
        sources = tuple(_drawn(source, number + place) if isinstance(source, Scene) else before[source - 1].pixels for place, source in enumerate(wish.sources))
        names = [f"phase_parallel_demo_{number}_{place}.png" for place in range(1, len(sources) + 1)]
        for title, pixels in zip(names, sources, strict=True):
            upload_image(self._url, title, png(pixels))
        graph = demo_graph(
            name, wish, checkpoint=self._folders[wish.kind].name, guidance=self._guidance[wish.kind], seed=number, pictures=names
        )
        progress = DemoProgress(sys.stdout, before=get_json(self._url + STATUS_ROUTE))
        history = asyncio.run(run_prompt(self._url, graph, progress))
        for phase, seconds in progress.seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        (content,) = saved_images(self._url, history)
        file = self._output / f"{self._stamp}_{number}.png"
        file.write_bytes(content)
        pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        digest = wait_for_equal_digests(self._url)[0]
        return Made(wish, name, sources, pixels, file, judge(pixels, wish.wanted), digest, time.monotonic() - began)


def _drawn(scene: Scene, seed: int) -> np.ndarray:
    return render(scene, *size_of(scene.aspect), seed)


def png(pixels: np.ndarray) -> bytes:
    """uint8 `[H, W, 3]` as a file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
