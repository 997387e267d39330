"""Engines of every rank, loaded once a test run; each test continues with a communicator and prefixes of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.model import HunyuanImage3Model
from phase_parallel.models.hunyuan_image_3.tokenizer import HunyuanTokenizer
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan

_loaded: dict[tuple[Path, ParallelPlan, LoadOptions], tuple[HunyuanImage3Model, HunyuanTokenizer]] = {}
_DEFAULT = LoadOptions()


def engine_of(
    folder: Path,
    plan: ParallelPlan,
    comm: Communicator,
    *,
    options: LoadOptions = _DEFAULT,
    cfg_mode: str = "batched",
    reuse_text: bool = True,
) -> Engine:
    """A new engine over weights that this rank may have loaded before. Collective the first time, like Engine.load."""
    key = (folder, plan, options)
    if key not in _loaded:
        first = Engine.load(folder, plan, comm, options, device=torch.device("cpu"))
        _loaded[key] = (first.model, first.tokenizer)
    model, tokenizer = _loaded[key]
    engine = Engine(model, tokenizer, options=options, cfg_mode=cfg_mode, reuse_text=reuse_text)
    engine.connect(comm)
    return engine
