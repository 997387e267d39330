"""One whole picture of ``phase-parallel bench e2e``: the calls that a prompt makes, with a text of given length.

What differs from a prompt: the ranks are called without ComfyUI, the weights are random, and the text goes on to its given length whatever its tokens
are. The picture's rows hold exactly those tokens, as a real text does whose tokens are found again in its words.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from ..models.hunyuan_image_3.denoise import DenoiseRow, StepTrace
from ..models.hunyuan_image_3.engine import Engine, ImageRequest
from ..models.hunyuan_image_3.model import ReferenceFeatures
from ..models.hunyuan_image_3.references import PreparedReference, draw_noise, prepare_reference
from ..models.hunyuan_image_3.sequence import CondImage, ImageRows, build_image_rows
from ..models.hunyuan_image_3.text_generation import Sampling, TextRequest, TextResult
from ..parallel.section import Section, digest_of
from .ar import DRAW, LETTERS, NoRules, Task, prompt_text
from .denoise import FLOW_SHIFT, GUIDANCE
from .errors import BenchError
from .picture_clock import PartClock, Residence, require_no_copy
from .release import Release

PARTS = ("encode", "text", "prefill", "decode", "switch", "rows", "prefix", "denoise", "vae")
"""``encode``: the reference picture. ``text``: row and cache of the text before it, its words after it. ``switch``: from the last token until the views
of denoise are there. ``rows``: the token rows of the picture. ``prefix``: keys and values that the text has not left, of both branches."""
SEED = 0


@dataclass(frozen=True)
class Trace:
    """How much is written and drawn."""

    task: Task
    text_tokens: int
    steps: int


@dataclass(frozen=True)
class Picture:
    """One measured picture on one rank. ``seconds`` and ``peaks`` by part, ``step_ms`` of every step; the digests are equal on all ranks."""

    seconds: dict[str, float]
    peaks: dict[str, int]
    step_ms: list[float]
    prompt_tokens: int
    prefix: int
    reused: int
    image_tokens: int
    words: dict[str, str]
    switch: dict[str, int]
    tokens_digest: str
    digest: str

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def median_step_ms(self) -> float:
        return sorted(self.step_ms)[len(self.step_ms) // 2]


class WholePicture:
    """A call makes the picture of one trace, from nothing but the weights; each one is the same."""

    def __init__(self, engine: Engine, built: Release, trace: Trace, section: Section):
        self._engine, self._built, self._trace, self._section = engine, built, trace, section
        task, config = trace.task, built.config
        self.request = TextRequest(
            prompt=prompt_text(built, task),
            system_prompt=None,
            cot_text=None,
            task="think",
            need_ratio=False,
            max_new_tokens=trace.text_tokens,
            sampling=Sampling(DRAW.do_sample, DRAW.temperature, DRAW.top_k, DRAW.top_p, seed=SEED),
        )
        self._references = reference_pictures(engine, task.pictures)
        self._cond_images = tuple(picture.cond_image(config) for picture in self._references)
        shapes = [(1, config.vae.latent_channels, *image.vae_grid) for image in self._cond_images]
        self._noises, _ = draw_noise(SEED, shapes, (1,))

    def __call__(self) -> Picture:
        engine, section = self._engine, self._section
        engine.prefixes.clear()
        home = Residence.of(engine.model.resident)
        engine.model.comm.control_gather([0])  # all ranks begin together
        clock = PartClock(engine.model.device)
        section.start_phase("image encode")
        encoded = engine.encode_references(self._references, self._noises)
        features = tuple(picture.features for picture in encoded)
        clock.end("encode")
        text, before = self._write(features, clock)
        after = clock.allocated
        moved = home.moved_bytes(engine.model.resident)
        home.require_unmoved(engine.model.resident, "after the switch")
        require_no_copy(before, clock.peaks.get("switch", before))
        rows = picture_rows(self._built, self._trace.task, self._cond_images, text)
        clock.end("rows")
        section.start_phase("denoise")
        known = engine.prefixes.known_tokens(rows.cond, features)
        engine.denoiser.prepare([DenoiseRow(rows.cond, "cond", features), DenoiseRow(rows.uncond, "uncond", features)])
        clock.end("prefix")
        latent, step_ms = self._draw(rows, features)
        clock.end("denoise")
        pixels = self._decode(latent)
        clock.end("vae")
        home.require_unmoved(engine.model.resident, "after the picture")
        return Picture(
            seconds=clock.seconds,
            peaks=clock.peaks,
            step_ms=step_ms,
            prompt_tokens=len(text.prompt_tokens),
            prefix=rows.cond.prefix_length,
            reused=known,
            image_tokens=latent.shape[-1] * latent.shape[-2],
            words={"decode": text.decode, "reduction": text.reduction, "moe": engine.moe_words},
            switch={
                "tensors": len(home.places), "weight_bytes": home.nbytes, "moved_bytes": moved, "allocated_before": before, "allocated_after": after,
                "allocated_most": clock.peaks.get("switch", before),
            },
            tokens_digest=digest_of(list(text.tokens), {}),
            digest=digest_of({}, {"pixels": pixels}),
        )  # fmt: skip

    def _write(self, features: tuple[ReferenceFeatures, ...], clock: PartClock) -> tuple[TextResult, int]:
        """The text and the switch behind it, and the bytes that were allocated when the last token was known."""
        section, allocated = self._section, [0]
        section.start_phase("AR", "token")

        def check(done: int, total: int) -> None:
            section.check(done, total)
            if done == 0:
                clock.end("text")
            if done == total:
                clock.end("decode", wait=False)
                allocated[0] = clock.allocated

        text = self._engine.generate_text(
            self.request, features=features, cond_images=self._cond_images, check=check, report=section.report, rules=NoRules()
        )
        if len(text.tokens) != self._trace.text_tokens:
            raise BenchError(f"the text ended after {len(text.tokens)} of {self._trace.text_tokens} tokens")
        returned = time.perf_counter()
        self._engine.model.comm.phase("denoise")
        clock.end("switch")
        views = time.perf_counter() - returned
        # Between the last token and the switch the host tells the user the text, and reads its parts.
        clock.move(clock.seconds["switch"] - text.close_seconds - views, "switch", "text")
        clock.move(text.prefill_seconds, "decode", "prefill")
        return text, allocated[0]

    def _draw(self, rows: ImageRows, features: tuple[ReferenceFeatures, ...]) -> tuple[torch.Tensor, list[float]]:
        engine, section = self._engine, self._section
        request = ImageRequest(rows, self._trace.steps, GUIDANCE, FLOW_SHIFT, (SEED,), features)
        show, stamps = engine.previews(request, section.report), [time.perf_counter()]

        def trace(index: int, step: StepTrace) -> None:
            show(index, step)  # waits for the device, one step behind
            stamps.append(time.perf_counter())

        latent = engine.sample(request, check=section.check, trace=trace)
        return engine.unscale(latent), [(b - a) * 1e3 for a, b in pairwise(stamps)]

    def _decode(self, latent: torch.Tensor) -> torch.Tensor:
        """At once, as a prompt does where there is room; NaN is refused by the engine."""
        engine, section = self._engine, self._section
        room = engine.vae_room(*latent.shape[2:])
        if not room.fits:
            raise BenchError(f"{room.words()}; close other programs on the GPUs")
        section.start_phase("VAE decode", "block")
        return engine.vae_decode(latent, check=section.check)


def reference_pictures(engine: Engine, count: int) -> list[PreparedReference]:
    """Pictures of noise, squares of the model's base size, as the host prepares them."""
    side, random = engine.config.image_base_size, np.random.default_rng(SEED)
    return [prepare_reference(random.integers(0, 256, (side, side, 3), dtype=np.uint8), engine.config, engine.table) for _ in range(count)]


def picture_rows(built: Release, task: Task, cond_images: tuple[CondImage, ...], text: TextResult) -> ImageRows:
    """The rows that a text of ``text``'s length gives, with its tokens in their place; its last one gives way to the tag that ends it."""
    side, body = built.config.image_base_size, text.tokens[:-1]
    rows = build_image_rows(
        built.tokenizer,
        built.config,
        prompt=prompt_text(built, task),
        system_prompt=None,
        cot_text=f"<think>{''.join(LETTERS[: len(body)])}</think>",
        cond_images=cond_images,
        height=side,
        width=side,
    )
    begin = len(text.prompt_tokens)
    tokens = (*rows.cond.tokens[:begin], *body, *rows.cond.tokens[begin + len(body) :])
    return replace(rows, cond=replace(rows.cond, tokens=tokens))
