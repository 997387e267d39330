"""A long prefix of pictures and text: no tensor grows with the square of its length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from thread_world import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phase_parallel.models.hunyuan_image_3 import sequence, token_row
from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.model import ReferenceFeatures
from phase_parallel.models.hunyuan_image_3.sequence import CondImage, build_image_rows
from phase_parallel.models.hunyuan_image_3.synthetic import SyntheticSpec, write_checkpoint
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.plan import ParallelPlan

# One layer is enough: all layers are alike. 768 x 768 pictures with 400 patches.
SPEC = SyntheticSpec(
    kind="instruct", layers=1, heads=4, kv_heads=2, image_base_size=768, vit_slots=400, latent_channels=4, vit_layers=1, max_positions=16384
)
SQUARE = 16  # row of the size table


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


def prefill(engine: Engine, pictures: int, letters: int) -> tuple[int, int]:
    """(length of the prefix, bytes of the largest tensor while it is computed)."""
    config = engine.config
    grid = (48, 48)
    features = tuple(
        ReferenceFeatures(torch.randn(config.vae.latent_channels, *grid), torch.randn(400, config.hidden_size), f"picture {i}")
        for i in range(pictures)
    )
    rows = build_image_rows(
        engine.tokenizer, config, prompt="one scene", system_prompt=None, cot_text=f"<recaption>{'ab' * (letters // 2)}</recaption>",
        cond_images=[CondImage(SQUARE, grid, (20, 20), 400)] * pictures, height=768, width=768,
    )  # fmt: skip
    with LargestTensor() as largest:
        engine.prefixes.prepare(rows.cond, features, frozenset({0}))
    return rows.cond.prefix_length, largest.nbytes


def test_memory_of_three_pictures_and_two_thousand_tokens_is_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a dense mask was built outside of a check")

    for module in (sequence, token_row):
        monkeypatch.setattr(module, "dense_mask", refuse)
    write_checkpoint(tmp_path / "checkpoint", SPEC)

    def body(plan: ParallelPlan, comm: Communicator) -> tuple[tuple[int, int], tuple[int, int]]:
        engine = Engine.load(tmp_path / "checkpoint", plan, comm, LoadOptions(), device=torch.device("cpu"))
        return prefill(engine, 1, 400), prefill(engine, 3, 2000)

    (short, small), (long, large) = run_ranks(body, "single", world_size=1)[0]
    assert long > 10_000
    assert large < long * long, "not even one byte per pair of tokens"
    assert large / small < 1.2 * long / short
    print(f"prefix of {short} tokens: largest tensor {small / 1e6:.1f} MB; of {long} tokens: {large / 1e6:.1f} MB")
