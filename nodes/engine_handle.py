"""One checkpoint as the nodes see it: what MODEL, CLIP and VAE sockets share.

The handle owns no weights. It says which engine an operation needs (a rank that lost its engine loads it
again), keeps what rank 0 needs for words and sizes, and sends every operation through the driver, which runs
it on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.loading import LoadOptions, check_folder
from ..models.hunyuan_image_3.operations import MODEL
from ..models.hunyuan_image_3.sequence import resolution_table
from ..models.hunyuan_image_3.tokenizer import HunyuanTokenizer
from ..models.hunyuan_image_3.topology_choice import Case, DenoiseWay, TopologyWish, choose_way
from ..parallel.plan import ParallelPlan
from .latent_preview import PreviewFactors

Tensors = dict[str, torch.Tensor]
Report = Callable[[dict[str, Any]], None]

USUAL_PREFIX = 1251
"""Tokens in front of a picture without reference pictures, as in the published figures; for words about a plan."""

UNKNOWN_NODE = "0"
"""Node id in keys and messages where a host does not tell which node calls a VAE or MODEL."""


class Held(Protocol):
    """What stands for the weights in ComfyUI's memory management."""

    patcher: Any

    def hold(self) -> None: ...


class Calls(Protocol):
    """The part of the driver that a handle uses."""

    def call(
        self,
        op: str,
        args: dict[str, Any],
        tensors: Tensors | None = None,
        *,
        node_id: str,
        plan: ParallelPlan | None = None,
        report: Report | None = None,
    ) -> tuple[dict[str, Any], Tensors]: ...


@dataclass(frozen=True)
class EngineChoice:
    """Everything that makes one engine differ from another; a plan without "auto"."""

    folder: str
    plan: ParallelPlan
    weight_dtype: str
    moe_layout: str
    moe_path: str
    kernels: str = "auto"
    moe_backend: str = "auto"

    @property
    def key(self) -> str:
        return sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]

    def arguments(self) -> dict[str, Any]:
        """What operations find the engine by; the plan travels beside it."""
        return {name: value for name, value in asdict(self).items() if name != "plan"}


class EngineHandle:
    """Raises, before any collective, a ValueError that says what is wrong with the folder or the choices."""

    def __init__(
        self,
        choice: EngineChoice,
        calls: Calls,
        *,
        reason: str = "",
        residence: Held | None = None,
        wish: TopologyWish | None = None,
    ) -> None:
        """``residence`` None: no ComfyUI manages the memory here, as in a test. ``wish``: what is fixed of how runs denoise, None as in the plan."""
        options = LoadOptions(choice.weight_dtype, choice.moe_layout, choice.moe_path, choice.kernels, moe_backend=choice.moe_backend)
        check_folder(choice.folder, choice.plan, options)
        self.choice = choice
        self.wish = wish or TopologyWish.of(choice.plan)
        self.reason = reason
        self.config = HunyuanImage3Config.from_folder(choice.folder)
        self.tokenizer = HunyuanTokenizer.from_folder(choice.folder, self.config)
        self.table = resolution_table(self.config, self.tokenizer)
        self.preview: PreviewFactors | None = None
        self._calls = calls
        self.residence = residence

    @property
    def key(self) -> str:
        return self.choice.key

    @property
    def folder(self) -> Path:
        return Path(self.choice.folder)

    @property
    def name(self) -> str:
        return self.folder.name

    def describe(self) -> str:
        """The checkpoint and how it is split, for messages."""
        return f"{self.name} ({self.choice.plan.describe()}, weights {self.choice.weight_dtype})"

    def plan_words(self) -> str:
        """The plan, and where it denoises in one way or another both of them, for a picture of the model's own size."""
        own, usual = self.choice.plan, self.config.image_base_size // self.config.vae.ffactor_spatial
        ways = [self.denoise_way(guided=guided, image_tokens=usual**2, prefix=USUAL_PREFIX) for guided in (True, False)]
        guided, other = (own.denoising(way.denoise, way.attention).describe() for way in ways)
        return guided if guided == other else f"{guided} with guidance, {other.rpartition(' · denoise ')[2]} without"

    def denoise_way(self, *, guided: bool, image_tokens: int, prefix: int) -> DenoiseWay:
        """How a run is denoised; decided here on rank 0, and sent with the call."""
        case = Case(guided, image_tokens, prefix)
        return choose_way(self.choice.plan, self.wish, case, kv_heads=self.config.num_key_value_heads)

    def call(
        self,
        op: str,
        args: dict[str, Any],
        tensors: Tensors,
        *,
        node_id: str | None,
        report: Report | None = None,
    ) -> tuple[dict[str, Any], Tensors]:
        """Run the model's operation `op` on all ranks with this engine. `args` is JSON.

        Raises what the driver raises: the host's interruption, or one sentence that names rank and phase.
        """
        if self.residence is not None:
            self.residence.hold()  # any operation may load the weights
        return self._calls.call(
            f"{MODEL}.{op}",
            {"engine": self.choice.arguments(), **args},
            tensors,
            node_id=node_id or UNKNOWN_NODE,
            plan=self.choice.plan,
            report=report,
        )

    def snap(self, height: int, width: int) -> tuple[int, int]:
        """The size this checkpoint draws when asked for one: (height, width) of the nearest table row."""
        return self.table.size(self.table.nearest(height, width))
