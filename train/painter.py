"""Asks an engine for pictures as the nodes do: the same text stage, rows, references, sampling loop, decoding and rounding. Every rank calls alike.

Imports torch, numpy and the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.engine import Engine, ImageRequest
from ..models.hunyuan_image_3.model import ReferenceFeatures
from ..models.hunyuan_image_3.references import prepare_reference
from ..models.hunyuan_image_3.sequence import CondImage, build_image_rows
from ..models.hunyuan_image_3.system_prompts import OFFICIAL_FILE, official_prompt, resolve_system_prompt
from ..models.hunyuan_image_3.text_generation import Sampling, TextRequest
from ..models.hunyuan_image_3.text_rules import BotTask, keep_recaption

Check = Callable[[int, int], None]
TEXT_TOKENS = 400
"""More than the longest thought and recaption of this room need."""
_GREEDY = Sampling()


@dataclass(frozen=True)
class Wish:
    """What a user gives. `task`: "image" writes no text; `size`: (height, width), or None for the model to choose; `pictures`: uint8 `[H, W, 3]` each."""

    prompt: str
    task: BotTask
    size: tuple[int, int] | None
    seed: int
    pictures: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Written:
    """`cot_text` with its tags, `recaption` its readable part; both empty where nothing was written. `size`: (height, width) of the size table."""

    cot_text: str
    recaption: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Steps:
    """How a picture is drawn."""

    steps: int
    guidance: float
    flow_shift: float

    @classmethod
    def of(cls, config: HunyuanImage3Config, *, steps: int | None = None, guidance: float | None = None) -> Steps:
        """None stands for the checkpoint's own value."""
        own = config.generation
        return cls(steps or own.diff_infer_steps, own.diff_guidance_scale if guidance is None else guidance, own.flow_shift)


class Painter:
    """`folder`: the checkpoint's, for the system prompts. `check`: the section's, called at every step and every few tokens."""

    def __init__(self, engine: Engine, folder: Path, steps: Steps, *, check: Check = lambda done, total: None) -> None:
        self.engine = engine
        self.steps = steps
        self._folder = folder
        self._check = check

    def write(self, wish: Wish) -> Written:
        """The text stage alone. A text that was cut before its size token gets its size in one more pass."""
        if wish.task == "image" and wish.size is not None:
            return Written("", "", self._snapped(wish.size))
        features, images = self._references(wish)
        own, writes = self.engine.config.generation, wish.task != "image"
        request = TextRequest(
            prompt=wish.prompt,
            system_prompt=self._system_prompt(wish.task),
            cot_text=None,
            task=wish.task if writes else "img_ratio",
            need_ratio=wish.size is None,
            max_new_tokens=TEXT_TOKENS if writes else 1,
            sampling=Sampling(own.do_sample, own.temperature, own.top_k, own.top_p, own.repetition_penalty, wish.seed),
        )
        result = self.engine.generate_text(request, features=features, cond_images=images, check=self._check)
        cot_text = "" if result.legal is None else result.legal.cot_text
        if wish.size is not None:
            return Written(cot_text, result.recaption or "", self._snapped(wish.size))
        index = result.ratio_index
        if index is None:
            again = replace(request, cot_text=cot_text or None, task="img_ratio", sampling=_GREEDY)
            index = self.engine.generate_text(again, features=features, cond_images=images, check=self._check).ratio_index
        assert index is not None, "the rules leave only size tokens"
        return Written(cot_text, result.recaption or "", self.engine.table.size(index))

    def draw(self, wish: Wish, written: Written) -> np.ndarray:
        """The picture after `write`, uint8 `[H, W, 3]`, rounded as a saved one."""
        features, images = self._references(wish)
        cot_text, system_prompt = written.cot_text, self._system_prompt(wish.task)
        if cot_text and self.engine.config.generation.drop_think:
            cot_text = keep_recaption(cot_text)
            system_prompt = system_prompt and official_prompt(self._folder / OFFICIAL_FILE, "en_recaption")
        rows = build_image_rows(
            self.engine.tokenizer,
            self.engine.config,
            prompt=wish.prompt,
            system_prompt=system_prompt,
            cot_text=cot_text or None,
            cond_images=images,
            height=written.size[0],
            width=written.size[1],
        )
        own = self.steps
        request = ImageRequest(rows, own.steps, own.guidance, own.flow_shift, (wish.seed,), features)
        latent = self.engine.sample(request, check=self._check)
        decoded = self.engine.vae_decode(self.engine.unscale(latent), check=self._check)
        return to_uint8(decoded[0])

    def _system_prompt(self, task: BotTask) -> str | None:
        config = self.engine.config
        return resolve_system_prompt(self._folder, config.generation.use_system_prompt, kind=config.kind, task=task)

    def _references(self, wish: Wish) -> tuple[tuple[ReferenceFeatures, ...], tuple[CondImage, ...]]:
        """Encoded once: the engine keeps them between text and picture."""
        prepared = [prepare_reference(picture, self.engine.config, self.engine.table) for picture in wish.pictures]
        return self.engine.references.get(self.engine.references.encode(prepared, wish.seed))

    def _snapped(self, size: tuple[int, int]) -> tuple[int, int]:
        return self.engine.table.size(self.engine.table.nearest(*size))


def to_uint8(decoded: torch.Tensor) -> np.ndarray:
    """`[3, H, W]` in [-1, 1], not clamped -> uint8 `[H, W, 3]`, cut to whole levels as ComfyUI's Save Image does."""
    levels = (decoded.float().cpu() * 0.5 + 0.5).clamp(0, 1) * 255
    return levels.to(torch.uint8).movedim(0, -1).contiguous().numpy()
