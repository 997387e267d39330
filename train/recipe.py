"""The whole way from nothing to both checkpoints: VAE, vision tower, corpus, trunk, distillation, folders. Every stage is kept and not made again.

Imports torch, safetensors and its neighbours.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .corpus import CHUNK, SHARED_MEMORY, Counts, Encoders, build_corpus, drawing_processes
from .distil_training import train_distil
from .errors import MiniError
from .loop import LossLog
from .loss_plot import plot_losses
from .mini import NAMES, SPEC, mini_config, write_mini
from .objective import DROPPED, NOISE_SHIFT, TEXT_WEIGHT
from .scenes import CENTRES, EXTENT, PLACE_JITTER, SIZE_JITTER
from .tower_training import TowerRecipe, train_tower
from .training_run import Keeping, Pace, Tensors
from .trunk_training import SHARES, train_trunk
from .vae_training import VaeRecipe, train_vae

Tell = Callable[[str], None]
LOG, PLOT = "losses.jsonl", "losses.png"
RESTS_ON = {"vae": ("vae",), "tower": ("tower",), "trunk": ("vae", "tower", "corpus", "trunk"), "distil": ("vae", "tower", "corpus", "trunk", "distil")}
"""The parts of the recipe that decide a stage."""


@dataclass(frozen=True)
class Recipe:
    """How long each stage goes on. ``corpus``: examples of each (source pictures, writing)."""

    vae: VaeRecipe
    tower: TowerRecipe
    corpus: Counts
    trunk: Pace
    distil: Pace
    seed: int = 0

    def scaled(self, share: float) -> Recipe:
        """A shorter run, to try the program; its pictures mean nothing."""

        def less(count: int) -> int:
            return max(1, math.ceil(count * share))

        return replace(
            self,
            vae=self.vae.scaled(share),
            tower=self.tower.scaled(share),
            corpus={kind: less(count) for kind, count in self.corpus.items()},
            trunk=self.trunk.scaled(share),
            distil=self.distil.scaled(share),
        )


FULL = Recipe(
    vae=VaeRecipe(),
    tower=TowerRecipe(),
    corpus={
        (0, "nothing"): 44_000,
        (0, "recaption"): 12_000,
        (0, "think_recaption"): 36_000,
        (1, "nothing"): 9_000,
        (1, "recaption"): 6_000,
        (1, "think_recaption"): 24_000,
        (2, "nothing"): 6_000,
        (2, "recaption"): 4_000,
        (2, "think_recaption"): 18_000,
    },
    # Steps count for more than the size of a batch: in 84 s of an H200, on wishes without text, 5,911 steps of 45,000 tokens ended at a velocity loss of
    # 0.041 on pictures that were not trained on, 3,392 steps of 90,000 at 0.052. PyTorch's Muon, whose steps take 3.4 and 2.5 times as long, ended at 0.086
    # and 0.074.
    trunk=Pace(steps=50_000, tokens=45_000, rate=1.5e-3),
    distil=Pace(steps=2_400, tokens=20_000, rate=5e-4),
)
"""For one H200."""


def train(folder: Path, device: torch.device, *, recipe: Recipe, workers: int, tell: Tell) -> None:
    """Both checkpoint folders, the losses and their plot below ``folder``, and what each stage left in ``folder/stages``. What is there is not made again.

    Raises MiniError when a kept stage was made by another recipe or cannot be read, when numbers are no longer finite, and at the very end without
    matplotlib.
    """
    stages, log = Stages(folder / "stages", recipe, device, tell), LossLog(folder / LOG)
    seed = recipe.seed
    config, _ = mini_config("instruct", 1.0)
    vae = stages.make("vae", lambda _: train_vae(config.vae, recipe.vae, device=device, seed=seed, log=log))
    scaling = float(vae.pop("scaling_factor"))
    config, _ = mini_config("instruct", scaling)
    tower = stages.make("tower", lambda _: train_tower(config.vit, recipe.tower, device=device, seed=seed, log=log))
    shared = vae | tower
    wanted = [name for name in ("trunk", "distil") if not stages.has(name)]
    buckets = []
    if wanted:
        processes = drawing_processes(workers)
        fewer = "" if processes == workers else f", for more than which {SHARED_MEMORY} has no room"
        tell(f"Drawing and encoding {sum(recipe.corpus.values())} examples with {processes} processes{fewer} ...")
        buckets = build_corpus(Encoders(config, shared, device), recipe.corpus, seed=seed, workers=processes, tell=partial(_tell_share, tell))
    trunk = stages.make("trunk", lambda keeping: train_trunk(config, buckets, recipe.trunk, seed=seed, log=log, keeping=keeping))
    distil_config, tokenizer = mini_config("distil", scaling)
    distil = stages.make(
        "distil", lambda keeping: train_distil(distil_config, tokenizer, config, trunk, buckets, recipe.distil, seed=seed, log=log, keeping=keeping)
    )
    for kind, own in (("instruct", trunk), ("distil", distil)):
        target = folder / NAMES[kind]
        if not target.exists():
            write_mini(target, kind, own | shared, scaling)
        tell(f"The checkpoint is in {target}.")
    log.flush()
    plot_losses(folder / LOG, folder / PLOT)
    tell(f"The losses are in {folder / LOG} and {folder / PLOT}.")


def _tell_share(tell: Tell, done: int, total: int) -> None:
    if done * 10 // total != max(0, done - CHUNK) * 10 // total:
        tell(f"  {done} of {total}")


class Stages:
    """Results of stages as files, each with the part of the recipe that made it."""

    def __init__(self, folder: Path, recipe: Recipe, device: torch.device, tell: Tell) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._device, self._tell, self._recipe = folder, device, tell, recipe

    def _mark(self, name: str) -> str:
        """What the stage depends on."""
        parts = {part: repr(getattr(self._recipe, part)) for part in (*RESTS_ON[name], "seed")}
        parts["pictures"] = repr((EXTENT, CENTRES, PLACE_JITTER, SIZE_JITTER))
        if "trunk" in RESTS_ON[name]:
            parts["objective"] = repr((SHARES, TEXT_WEIGHT, NOISE_SHIFT, DROPPED))
        return json.dumps({"sizes": asdict(SPEC), **parts}, sort_keys=True)

    def file(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        return self.file(name).is_file()

    def make(self, name: str, run: Callable[[Keeping], Mapping[str, Tensor]]) -> Tensors:
        """What ``run`` returns, or the file that an earlier run left. What a stopped one kept last lies beside it, and is gone on with."""
        file, mark = self.file(name), self._mark(name)
        if file.is_file():
            self._tell(f"The stage {name} is there: {file}.")
            return self._read(file, mark)
        unfinished = file.with_name(f"{name}.unfinished")
        begun = self._read(unfinished, mark) if unfinished.is_file() else None
        self._tell(f"Training: {name}{' goes on' if begun else ''} ...")
        made = dict(run(Keeping(lambda state: self._save(unfinished, state, mark), begun)))
        self._save(file, made, mark)
        unfinished.unlink(missing_ok=True)
        return made

    def _save(self, file: Path, weights: Mapping[str, Tensor], mark: str) -> None:
        beside = file.with_name(f"{file.name}.part")
        save_file({key: value.detach().cpu().contiguous() for key, value in weights.items()}, beside, metadata={"recipe": mark})
        os.replace(beside, file)

    def _read(self, file: Path, mark: str) -> Tensors:
        try:
            with safe_open(file, "pt") as opened:
                recipe = (opened.metadata() or {}).get("recipe")
            if recipe != mark:
                raise MiniError(f"{file} was made by another recipe; remove it, or train into another folder.")
            return {key: value.to(self._device) for key, value in load_file(file).items()}
        except SafetensorError as error:
            raise MiniError(f"{file} cannot be read ({error}); remove it, and the stage is trained again.") from error
