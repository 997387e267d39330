"""Trains the vision tower: the pack's own `VisionTower` on rendered scenes, so that its patches say what they show.

Two losses. The pooled features of a picture must find the description of its scene among those of a batch (SigLIP's sigmoid loss), and a linear map of
each patch must name the shape that covers it. The side of the descriptions and the linear map are thrown away.

Letters: N pictures, P patch slots, D tower width. Imports torch, numpy and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models.hunyuan_image_3.blocks import LayerNorm
from ..models.hunyuan_image_3.config import VitConfig
from ..models.hunyuan_image_3.reference_images import vit_patches
from ..models.hunyuan_image_3.vision import Mlp, VisionTower
from .drawing import render
from .loop import Average, LossLog, Stepper, seeded
from .packing import patches_as_bytes, patches_from_bytes
from .scenes import ASPECTS, BACKGROUNDS, CENTRES, COLOURS, EXTENT, KINDS, MAX_OBJECTS, POSITIONS, SIZES, Scene, random_scene, size_of

NAMES = {"kind": KINDS, "colour": COLOURS, "size": SIZES, "position": POSITIONS}
"""What a description says of each object, and what it can say."""
OF_PATCHES = ("kind", "colour", "size")
"""What a patch must tell of the object that covers it."""
NOTHING = -1
FIRST_SCALE, FIRST_BIAS = math.log(10.0), -10.0
"""SigLIP's start of the similarity's scale and offset: nearly all pairs are no pairs."""
FIRST_SEED = 1_000_000


@dataclass(frozen=True)
class TowerRecipe:
    """``pictures`` are rendered once, from the training side of the split."""

    steps: int = 2000
    batch: int = 256
    pictures: int = 8000
    rate: float = 2e-3
    patches: float = 1.0
    """Weight of the loss of the patches beside the sigmoid loss."""

    def scaled(self, share: float) -> TowerRecipe:
        """A shorter run, to try the program."""
        return replace(self, steps=math.ceil(self.steps * share), pictures=max(self.batch, math.ceil(self.pictures * share)))


class PoolingHead(nn.Module):
    """Attention of one learned query over the real patches, then an MLP: checkpoint prefix `vision_model.head.`. No picture is made with it."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, config.hidden_size))
        self.attention = nn.MultiheadAttention(config.hidden_size, config.num_attention_heads, batch_first=True)
        self.layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """features [N, P, D], mask [N, P] bool -> [N, D]."""
        query = self.probe.expand(len(features), -1, -1)
        pooled, _ = self.attention(query, features, features, key_padding_mask=~mask, need_weights=False)
        return (pooled + self.mlp(self.layernorm(pooled)))[:, 0]


class TrainedTower(VisionTower):
    """The tower with its head: its parameters are the checkpoint's, below `vision_model.`."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__(config)
        self.head = PoolingHead(config)


class SceneEncoder(nn.Module):
    """Scenes as names to [N, D]: the objects one by one, then their sum with background and aspect."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 2 * width
        self.names = nn.ModuleDict({name: nn.Embedding(len(words), width) for name, words in NAMES.items()})
        self.object = nn.Sequential(nn.Linear(len(NAMES) * width, inner), nn.GELU(), nn.Linear(inner, inner))
        self.background = nn.Embedding(len(BACKGROUNDS), inner)
        self.aspect = nn.Embedding(len(ASPECTS), inner)
        self.whole = nn.Sequential(nn.LayerNorm(inner), nn.Linear(inner, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, described: Described) -> Tensor:
        objects, there = described.objects.clamp_min(0), described.objects[..., 0] != NOTHING
        features = self.object(torch.cat([self.names[name](objects[..., i]) for i, name in enumerate(NAMES)], dim=-1))
        summed = (features * there[..., None]).sum(1) + self.background(described.background) + self.aspect(described.aspect)
        return self.whole(summed)


@dataclass(frozen=True)
class Described:
    """Names of N scenes as indices: `objects` [N, MAX_OBJECTS, 4] in the order of NAMES, NOTHING where there is none; the others [N]."""

    objects: Tensor
    background: Tensor
    aspect: Tensor

    @classmethod
    def of(cls, scenes: Sequence[Scene]) -> Described:
        objects = torch.full((len(scenes), MAX_OBJECTS, len(NAMES)), NOTHING)
        for row, scene in zip(objects, scenes, strict=True):
            for place, thing in zip(row, scene.objects, strict=False):
                place[:] = torch.tensor([words.index(getattr(thing, name)) for name, words in NAMES.items()])
        background = torch.tensor([BACKGROUNDS.index(scene.background) for scene in scenes])
        return cls(objects, background, torch.tensor([ASPECTS.index(scene.aspect) for scene in scenes]))


@dataclass(frozen=True)
class Seen:
    """N pictures as the tower gets them, with what they show, on one device."""

    patches: Tensor
    """uint8 [N, P, patch_dim]: a quarter of fp32, and exact."""
    mask: Tensor
    """bool [N, P]"""
    grids: tuple[tuple[int, int], ...]
    described: Described
    covers: Tensor
    """[N, P]: which of the scene's objects covers a patch, NOTHING for the background and for empty slots."""

    @classmethod
    def draw(cls, seeds: Sequence[int], vit: VitConfig, *, unseen: bool) -> Seen:
        """Rendered on the CPU; the place and size of objects move with the seed too."""
        scenes = [random_scene(seed, unseen=unseen) for seed in seeds]
        parts = [vit_patches(render(scene, *size_of(scene.aspect), seed), vit) for scene, seed in zip(scenes, seeds, strict=True)]
        patches = torch.stack([patches_as_bytes(part) for part, _, _ in parts])
        grids = tuple(grid for _, _, grid in parts)
        covers = torch.stack([_covers(scene, grid, vit.max_num_patches) for scene, grid in zip(scenes, grids, strict=True)])
        return cls(patches, torch.stack([mask for _, mask, _ in parts]), grids, Described.of(scenes), covers)

    def to(self, device: torch.device) -> Seen:
        described = Described(*(part.to(device) for part in (self.described.objects, self.described.background, self.described.aspect)))
        return Seen(self.patches.to(device), self.mask.to(device), self.grids, described, self.covers.to(device))

    def rows(self, index: Tensor) -> Seen:
        """Some of the pictures: index [M] on the CPU."""
        there = index.to(self.mask.device)
        described = Described(*(part[there] for part in (self.described.objects, self.described.background, self.described.aspect)))
        return Seen(self.patches[there], self.mask[there], tuple(self.grids[i] for i in index.tolist()), described, self.covers[there])

    def features(self, tower: VisionTower) -> Tensor:
        """[N, P, D]"""
        return tower(patches_from_bytes(self.patches, self.mask), self.mask, self.grids)


def _covers(scene: Scene, grid: tuple[int, int], slots: int) -> Tensor:
    """[slots]: the object whose box, at its usual place, holds the middle of the patch; the middle of an object is always in a patch of its own."""
    height, width = size_of(scene.aspect)
    rows, columns = grid
    y = (torch.arange(rows) + 0.5)[:, None] * height / rows
    x = (torch.arange(columns) + 0.5) * width / columns
    found = torch.full((rows, columns), NOTHING)
    for number, thing in enumerate(scene.objects):
        row, column = thing.cell
        reach = EXTENT[thing.size] * min(height, width) / 2
        below, beside = (y - CENTRES[row] * height).abs(), (x - CENTRES[column] * width).abs()
        found[(below <= max(reach, height / rows / 2)) & (beside <= max(reach, width / columns / 2))] = number
    return F.pad(found.flatten(), (0, slots - rows * columns), value=NOTHING)


def _targets(seen: Seen) -> dict[str, Tensor]:
    """Of each name of a patch [N, P]: its index, and one more than the last for the background."""
    order = list(NAMES)
    targets = {}
    for name in OF_PATCHES:
        of_objects = seen.described.objects[..., order.index(name)]
        indices = of_objects.gather(1, seen.covers.clamp_min(0))
        targets[name] = torch.where(seen.covers == NOTHING, len(NAMES[name]), indices)
    return targets


class Sides(nn.Module):
    """What is trained beside the tower and thrown away."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scenes = SceneEncoder(width)
        self.scale = nn.Parameter(torch.tensor(FIRST_SCALE))
        self.bias = nn.Parameter(torch.tensor(FIRST_BIAS))
        self.named = nn.ModuleDict({name: nn.Linear(width, len(NAMES[name]) + 1) for name in OF_PATCHES})

    def similarity(self, pooled: Tensor, described: Described) -> Tensor:
        """[N, N]: rows are pictures, columns scenes."""
        return F.normalize(pooled, dim=-1) @ F.normalize(self.scenes(described), dim=-1).T


def train_tower(vit: VitConfig, recipe: TowerRecipe, *, device: torch.device, seed: int, log: LossLog) -> dict[str, Tensor]:
    """All tensors `vision_model.*` of the checkpoint, fp32, on the device: the running mean of the training."""
    tower, _ = fit_tower(vit, recipe, device=device, seed=seed, log=log)
    return {f"vision_model.{name}": tensor for name, tensor in tower.state_dict().items()}


def fit_tower(vit: VitConfig, recipe: TowerRecipe, *, device: torch.device, seed: int, log: LossLog) -> tuple[TrainedTower, Sides]:
    """The tower, and what `score_tower` needs beside it."""
    generator = torch.Generator().manual_seed(seed)
    with seeded(seed):
        both = nn.ModuleList([TrainedTower(vit), Sides(vit.hidden_size)])
    both.to(device)
    tower, sides = both
    seen = Seen.draw(range(FIRST_SEED * (seed + 1), FIRST_SEED * (seed + 1) + recipe.pictures), vit, unseen=False).to(device)
    stepper = Stepper(both.parameters(), steps=recipe.steps, highest=recipe.rate, decay=0.01)
    average = Average(both, decay=max(0.9, 1 - 30 / recipe.steps))
    for step in range(1, recipe.steps + 1):
        batch = seen.rows(torch.randperm(recipe.pictures, generator=generator)[: recipe.batch])
        sigmoid, patches = _losses(tower, sides, batch)
        norm = stepper.descend(sigmoid + recipe.patches * patches)
        average.update(both)
        log.add("tower", step, sigmoid=sigmoid.detach(), patches=patches.detach(), gradient=norm)
    stepper.check()
    both.load_state_dict(average.weights())
    return tower, sides


def _losses(tower: TrainedTower, sides: Sides, seen: Seen) -> tuple[Tensor, Tensor]:
    """The sigmoid loss, a sum over the scenes and a mean over the pictures, and the cross entropy of a patch: objects weigh as much as the background."""
    features = seen.features(tower)
    logits = sides.similarity(tower.head(features, seen.mask), seen.described) * sides.scale.exp() + sides.bias
    signs = 2 * torch.eye(len(logits), device=logits.device) - 1
    sigmoid = -F.logsigmoid(signs * logits).sum() / len(logits)
    real = features[seen.mask]
    covered = seen.covers[seen.mask] != NOTHING
    weights = torch.where(covered, 0.5 / covered.sum(), 0.5 / (~covered).sum())
    entropies = [F.cross_entropy(sides.named[name](real), target[seen.mask], reduction="none") for name, target in _targets(seen).items()]
    return sigmoid, (sum(entropies) * weights).sum()


@dataclass(frozen=True)
class TowerScore:
    """On scenes that no training shows; shares from 0 to 1."""

    retrieval: float
    """Pictures whose own scene is the most similar of 64."""
    patches: dict[str, float]
    """Patches under an object whose attribute a linear map names rightly."""


@torch.no_grad()
def score_tower(tower: TrainedTower, sides: Sides, vit: VitConfig, *, groups: int, seed: int) -> TowerScore:
    """``groups`` of 64 pictures."""
    right, named, count = 0, dict.fromkeys(OF_PATCHES, 0), 0
    device = next(tower.parameters()).device
    for group in range(groups):
        seen = Seen.draw(range(seed + 64 * group, seed + 64 * (group + 1)), vit, unseen=True).to(device)
        features = seen.features(tower)
        best = sides.similarity(tower.head(features, seen.mask), seen.described).argmax(1)
        right += int((best == torch.arange(64, device=device)).sum())
        covered = seen.covers != NOTHING
        count += int(covered.sum())
        for name, target in _targets(seen).items():
            named[name] += int((sides.named[name](features[covered]).argmax(-1) == target[covered]).sum())
    return TowerScore(right / (64 * groups), {name: hits / count for name, hits in named.items()})
