"""``phase-parallel bench memory``: peak device memory while a long prefix of pictures and text is computed, and how it grows."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..models.hunyuan_image_3.loading import LoadOptions
from ..models.hunyuan_image_3.model import HunyuanImage3Model
from ..models.hunyuan_image_3.prefix import PrefixStore
from ..models.hunyuan_image_3.sequence import build_image_rows
from ..parallel.plan import make_plan
from .environment import describe_machine
from .one_rank import OneRankCommunicator
from .pictures import cond_images, features_of
from .random_model import random_model
from .release import Release, release

# Pictures and letters of text; the last row is what the longest edit asks for.
PREFIXES = ((0, 1200), (0, 2400), (1, 2000), (2, 2000), (3, 2000))


@dataclass(frozen=True)
class MemoryRow:
    """Bytes beside the weights: the keys and values that stay, and the peak of everything else while the prefix is computed."""

    pictures: int
    tokens: int
    kv_bytes: int
    peak_bytes: int

    @property
    def peak_per_token(self) -> float:
        return self.peak_bytes / self.tokens


def measure(world_size: int, layers: int, *, device: torch.device) -> list[MemoryRow]:
    """One rank of plan ``tp`` on ``world_size`` ranks. Layers are alike, so a few of them show the peak; only the KV cache grows with their number."""
    built = release(layers=layers)
    name = "single" if world_size == 1 else "tp"
    plan = make_plan(name, world_size=world_size)
    model = random_model(built.config, plan, OneRankCommunicator(plan), LoadOptions(), device=device)
    return [_measure_prefix(model, built, pictures, letters) for pictures, letters in PREFIXES]


def _measure_prefix(model: HunyuanImage3Model, built: Release, pictures: int, letters: int) -> MemoryRow:
    config, device = built.config, model.device
    rows = build_image_rows(
        built.tokenizer,
        config,
        prompt="one scene",
        system_prompt=None,
        cot_text=f"<recaption>{'ab' * (letters // 2)}</recaption>",
        cond_images=list(cond_images(config, pictures)),
        height=config.image_base_size,
        width=config.image_base_size,
    )
    features = features_of(model, pictures)
    prefixes = PrefixStore(model)
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    prefixes.prepare(rows.cond, features, frozenset({0}))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before - prefixes.nbytes
    return MemoryRow(pictures, rows.cond.prefix_length, prefixes.nbytes, peak)


def report(world_size: int, layers: int, out: Path | None) -> None:
    """Print the table of one rank and, with ``out``, write it as JSON."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = measure(world_size, layers, device=device)
    print(f"one rank of TP{world_size}, 80B sizes, {layers} layers, bf16: memory beside the weights while a prefix is computed")
    print(f"{'pictures':>8} {'tokens':>7} {'KV cache':>10} {'peak':>10} {'peak/token':>11}")
    for row in rows:
        print(f"{row.pictures:8} {row.tokens:7} {row.kv_bytes / 1e6:7.0f} MB {row.peak_bytes / 1e6:7.0f} MB {row.peak_per_token / 1e3:8.0f} kB")
    if out is not None:
        values = {**describe_machine(device), "scheme": f"tp{world_size}", "task": "prefix_memory", "layers": layers}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**values, "rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")
