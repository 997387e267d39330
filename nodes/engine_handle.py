"""One loaded checkpoint as the nodes see it: what MODEL, CLIP and VAE sockets share.

The handle owns no weights. It names an engine by its load arguments, keeps what rank 0 needs for words and
sizes (configuration, tokenizer,
size table), and sends every operation through the driver, which runs it on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.sequence import resolution_table
from ..models.hunyuan_image_3.tokenizer import HunyuanTokenizer
from .latent_preview import PreviewFactors

Tensors = dict[str, torch.Tensor]
Report = Callable[[dict[str, Any]], None]

OPERATIONS = "hunyuan_image_3"
UNKNOWN_NODE = "0"


@dataclass(frozen=True)
class EngineSpec:
    """The arguments of the ``load`` operation: everything that makes one engine differ from another."""

    folder: str
    weight_dtype: str
    plan: str
    denoise: str
    attention: str
    moe_layout: str
    moe_path: str

    @property
    def key(self) -> str:
        return sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]


class EngineHandle:
    """A checkpoint on all ranks. Raises ConfigError or TokenizerError, before any collective, if the folder
    is not usable.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.config = HunyuanImage3Config.from_folder(spec.folder)
        self.tokenizer = HunyuanTokenizer.from_folder(spec.folder, self.config)
        self.table = resolution_table(self.config, self.tokenizer)
        self.info: dict[str, Any] = {}
        self.preview: PreviewFactors | None = None

    @property
    def key(self) -> str:
        return self.spec.key

    @property
    def name(self) -> str:
        return Path(self.spec.folder).name

    def describe(self) -> str:
        """The checkpoint and how it is split, for messages."""
        return f"{self.name} (plan {self.spec.plan}, weights {self.spec.weight_dtype})"

    def snap(self, height: int, width: int) -> tuple[int, int]:
        """The size this checkpoint draws when asked for one: (height, width) of the table row with the
        nearest proportions.
        """
        return self.table.size(self.table.nearest(height, width))
