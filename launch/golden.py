"""One case of a golden folder: run it through the engine and compare every expected tensor.

The format is described with the golden data: ``case.json`` says what to run, ``expected.safetensors`` what must come out. Nothing about a case is
known here beforehand; sizes, names and seeds come from its files. Runs on every rank of a plan at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..models.hunyuan_image_3.engine import Engine, ImageRequest
from ..models.hunyuan_image_3.references import EncodedReference, PreparedReference, draw_noise, prepare_reference
from ..models.hunyuan_image_3.schedule import flow_sigmas, flow_timesteps
from ..models.hunyuan_image_3.sequence import CondImage, ImageRows, build_image_rows
from ..models.hunyuan_image_3.system_prompts import clean_system_prompt
from ..models.hunyuan_image_3.text_generation import Sampling, TextRequest, TextResult
from ..models.hunyuan_image_3.text_rules import keep_recaption
from ..models.hunyuan_image_3.token_row import dense_mask, rope_tables
from .golden_modules import run_modules
from .golden_spec import CaseError, check_spec

Tensors = dict[str, torch.Tensor]
DEFAULT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Comparison:
    """One tensor: ``error`` is max|got - expected| / max|expected| (integers: 0 or infinity); infinity also when it is missing or misshapen."""

    tensor: str
    error: float
    limit: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class GoldenCase:
    """A case folder as read."""

    folder: Path
    spec: dict[str, Any]
    expected: Tensors

    @classmethod
    def read(cls, folder: Path) -> GoldenCase:
        """Raises CaseError for a folder that is incomplete, damaged, or not in the format."""
        try:
            spec = json.loads((folder / "case.json").read_text(encoding="utf-8"))
            expected = load_file(folder / "expected.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise CaseError(f"case {folder.name} cannot be read ({error}); it needs case.json and expected.safetensors") from error
        check_spec(folder.name, spec)
        if not expected:
            raise CaseError(f"case {folder.name} expects no tensor at all, so it can show nothing; copy expected.safetensors again")
        return cls(folder, spec, expected)

    @property
    def name(self) -> str:
        return self.spec.get("name", self.folder.name)

    @property
    def checkpoint(self) -> Path:
        return self.folder.parent.parent / "checkpoints" / self.spec["checkpoint"]

    def limit(self, tensor: str) -> float:
        tolerances = self.spec.get("tolerances", {})
        for pattern, value in tolerances.items():
            if pattern not in ("metric", "default", "integers") and fnmatchcase(tensor, pattern):
                return float(value)
        return float(tolerances.get("default", DEFAULT_TOLERANCE))


class Results(dict[str, torch.Tensor]):
    """Tensors by name; ``values`` holds what ``case.json`` itself expects: sizes, indices, texts."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, object] = {}


def compare(case: GoldenCase, got: Results) -> list[Comparison]:
    """Every expected tensor, in file order, then the expected words and sizes. What nothing computed is a failure, never skipped."""
    rows = []
    for name, expected in case.expected.items():
        limit = case.limit(name)
        value = got.get(name)
        if value is None:
            rows.append(Comparison(name, float("inf"), limit, "not computed"))
        elif tuple(value.shape) != tuple(expected.shape):
            rows.append(Comparison(name, float("inf"), limit, f"shape {list(value.shape)} instead of {list(expected.shape)}"))
        elif not expected.is_floating_point():
            different = int((value.to("cpu", torch.int64) != expected.to(torch.int64)).sum())
            rows.append(Comparison(name, float("inf") if different else 0.0, 0.0, f"{different} values differ" if different else ""))
        else:
            rows.append(Comparison(name, _relative(value, expected), limit))
    return rows + [_compare_value(name, value, got.values.get(name)) for name, value in case.spec.get("expected", {}).items()]


def _compare_value(name: str, expected: object, got: object) -> Comparison:
    """A size, an index or a text of ``case.json``, exact."""
    same = type(got) is type(expected) and got == expected
    return Comparison(f"expected.{name}", 0.0 if same else float("inf"), 0.0, "" if same else f"{got!r} instead of {expected!r}")


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    difference = (got.to("cpu", torch.float32) - expected.float()).abs().max()
    scale = expected.float().abs().max().clamp_min(1e-12)
    value = float(difference / scale)
    return value if value == value else float("inf")


def run_case(case: GoldenCase, engine: Engine, check: Callable[[int, int], None] = lambda done, total: None) -> Results:
    """All that the case asks for, computed freely from its inputs (no expected value is fed back)."""
    if case.spec["task"] == "modules":
        results = Results()
        results.update(run_modules(case.expected, engine))
        return results
    return _CaseRun(case, engine, check).run()


class _CaseRun:
    """The stages of one case in order: pictures, text, rows, denoise, decode."""

    def __init__(self, case: GoldenCase, engine: Engine, check: Callable[[int, int], None]):
        self.spec = case.spec
        self.folder = case.folder
        self.engine = engine
        self.check = check
        self.got = Results()

    def run(self) -> Results:
        prepared = self._pictures()
        cond_images = tuple(p.cond_image(self.engine.config) for p in prepared)
        shapes = [(1, self.engine.config.vae.latent_channels, *image.vae_grid) for image in cond_images]
        posterior, _ = draw_noise(self.spec["seed"], shapes, (1, 1, 1, 1))
        encoded = self.engine.encode_references(prepared, posterior)
        self._record_pictures(prepared, posterior, encoded)
        text = self._text_stage(encoded, cond_images)
        height, width = self._size(text)
        self.got["image_size"] = torch.tensor([height, width])
        self.got.values |= {"height": height, "width": width}
        if self.spec["denoise"]:
            rows = self._rows(text, cond_images, height, width)
            self._record_rows(rows)
            self._denoise(rows, encoded)
        return self.got

    def _pictures(self) -> list[PreparedReference]:
        pictures = []
        for name in self.spec["input_images"]:
            with Image.open(self.folder / name) as image:
                pictures.append(prepare_reference(image, self.engine.config, self.engine.table))
        return pictures

    def _record_pictures(self, prepared: list[PreparedReference], noises: list[torch.Tensor], encoded: list[EncodedReference]) -> None:
        for index, (picture, noise, done) in enumerate(zip(prepared, noises, encoded, strict=True)):
            self.got |= {
                f"cond{index}.pixels_u8": picture.pixels,
                f"cond{index}.vae_mean": done.mean,
                f"cond{index}.vae_logvar": done.logvar,
                f"cond{index}.posterior_noise": noise,
                f"cond{index}.latent": done.features.latent.unsqueeze(0),
                f"cond{index}.vit_patches": picture.patches,
                f"cond{index}.vit_mask": picture.mask,
                f"cond{index}.vit_grid": torch.tensor(picture.grid),
                f"cond{index}.vit_features": done.vit_features,
            }

    def _text_stage(self, encoded: list[EncodedReference], cond_images: tuple[CondImage, ...]) -> TextResult | None:
        auto = self._requested_size() == "auto"
        task = self.spec["bot_task"]
        if self.spec["task"] not in ("ar_text", "auto_ratio") and not auto:
            return None
        request = TextRequest(
            prompt=self.spec["prompt"],
            system_prompt=self._system_prompt(),
            cot_text=self.spec["cot_text"],
            task=task,
            need_ratio=auto,
            max_new_tokens=self.spec["max_new_tokens"] or 1,
            sampling=Sampling(do_sample=bool(self.spec["do_sample"]), seed=self.spec["seed"]),
        )
        logits: list[torch.Tensor] = []
        result = self.engine.generate_text(
            request,
            features=[e.features for e in encoded],
            cond_images=cond_images,
            check=self.check,
            trace=lambda row: logits.append(row.cpu()),
        )
        self.got["ar.prompt_tokens"] = torch.tensor(result.prompt_tokens)
        self.got["ar.generated_tokens"] = torch.tensor(result.tokens)
        self.got["ar.logits"] = torch.stack(logits)
        self.got.values |= {"generated_text": result.text, "cot_text": result.cot_text}
        if auto:
            self.got.values["ratio_index"] = result.ratio_index
            self.got["image_ratio.token"] = torch.tensor([result.tokens[-1]])
            self.got["image_ratio.index"] = torch.tensor([-1 if result.ratio_index is None else result.ratio_index])
        return result

    def _system_prompt(self) -> str | None:
        return clean_system_prompt(self.spec["system_prompt"], self.engine.config.kind)

    def _requested_size(self) -> int | str:
        return self.engine.table.parse_image_size(self.spec["image_size"], self.spec["kind"])

    def _size(self, text: TextResult | None) -> tuple[int, int]:
        index = self._requested_size()
        if index == "auto":
            index = text.ratio_index if text is not None and text.ratio_index is not None else self.engine.table.nearest(1, 1)
        return self.engine.table.size(index)

    def _rows(self, text: TextResult | None, cond_images: tuple[CondImage, ...], height: int, width: int) -> ImageRows:
        cot_text = text.cot_text if text is not None and text.cot_text is not None else self.spec["cot_text"]
        if cot_text and self.engine.config.generation.drop_think:
            cot_text = keep_recaption(cot_text)
        return build_image_rows(
            self.engine.tokenizer,
            self.engine.config,
            prompt=self.spec["prompt"],
            system_prompt=self._system_prompt(),
            cot_text=cot_text,
            cond_images=cond_images,
            height=height,
            width=width,
        )

    def _record_rows(self, rows: ImageRows) -> None:
        config, cond = self.engine.config, rows.cond
        for name, row in (("cond", cond), ("uncond", rows.uncond)):
            if row is not None:
                self.got[f"tokens.{name}"] = torch.tensor(row.tokens)
                self.got[f"mask.{name}"] = dense_mask(row, config.cond_token_attn_type)
        positions = cond.positions(config.cond_token_attn_type, rope_type=config.rope_type)
        self.got["rope.cos"], self.got["rope.sin"] = rope_tables(positions, config.head_dim, config.rope_theta)
        self.got["gen_image_slice"] = torch.tensor(cond.gen.image)
        for name in ("timestep", "guidance", "timestep_r"):
            index = getattr(cond.gen, f"{name}_index")
            if index is not None:
                self.got["gen_timestep_index" if name == "timestep" else f"{name}_index"] = torch.tensor([index])
        for number, span in enumerate(cond.cond):
            self.got[f"cond{number}.vae_slice"] = torch.tensor(span.vae)
            self.got[f"cond{number}.vit_slice"] = torch.tensor(span.vit)
            self.got[f"cond{number}.timestep_index"] = torch.tensor([span.timestep_index])

    def _denoise(self, rows: ImageRows, encoded: list[EncodedReference]) -> None:
        request = ImageRequest(
            rows=rows,
            steps=self.spec["steps"],
            guidance=self.spec["guidance"],
            flow_shift=self.spec["flow_shift"],
            seeds=(self.spec["seed"],),
            features=tuple(e.features for e in encoded),
        )
        sigmas = flow_sigmas(request.steps, request.flow_shift)
        self.got |= {"noise": self.engine.draw(request), "sigmas": sigmas, "timesteps": flow_timesteps(sigmas)[:-1]}
        latent = self.engine.sample(request, check=self.check, trace=self._record_step)
        self.got["latent.final"] = latent
        self.got["image"] = self.engine.vae_decode(self.engine.unscale(latent))[0]

    def _record_step(self, index: int, step: Any) -> None:
        self.got[f"step{index}.latent_in"] = step.latent_in
        self.got[f"step{index}.pred_cond"] = step.pred_cond
        if step.pred_uncond is not None:
            self.got[f"step{index}.pred_uncond"] = step.pred_uncond
        self.got[f"step{index}.pred"] = step.pred
