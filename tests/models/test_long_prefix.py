"""A long prefix of pictures and text: no tensor grows with the square of its length or has a place for every expert of every choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_world import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phase_parallel.kernels.attention import CAUSAL_ROWS
from phase_parallel.kernels.moe import MOE_PATHS, MoePath
from phase_parallel.models.hunyuan_image_3 import sequence, token_row
from phase_parallel.models.hunyuan_image_3.engine import Engine
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
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
    """The largest tensor that any operation made, in bytes and in elements. A view of an operand (say, of weights) is nothing new."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {storage.data_ptr() for storage in storages((args, kwargs))}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class Peak:
    """``length`` of the prefix and the largest tensor while it was computed."""

    length: int
    nbytes: int
    elements: int


def prefill(engine: Engine, pictures: int, letters: int) -> Peak:
    config = engine.config
    grid = (48, 48)
    features = tuple(
        engine.model.reference_features(torch.randn(config.vae.latent_channels, *grid), torch.randn(400, config.hidden_size), f"picture {i}")
        for i in range(pictures)
    )
    rows = build_image_rows(
        engine.tokenizer, config, prompt="one scene", system_prompt=None, cot_text=f"<recaption>{'ab' * (letters // 2)}</recaption>",
        cond_images=[CondImage(SQUARE, grid, (20, 20), 400)] * pictures, height=768, width=768,
    )  # fmt: skip
    with LargestTensor() as largest:
        engine.prefixes.prepare(rows.cond, features, frozenset({0}))
    return Peak(rows.cond.prefix_length, largest.nbytes, largest.elements)


def measure(folder: Path, spec: SyntheticSpec, runs: Sequence[tuple[int, int]], options: LoadOptions) -> list[Peak]:
    """One peak for each (pictures, letters)."""
    write_checkpoint(folder, spec)

    def body(plan: ParallelPlan, comm: Communicator) -> list[Peak]:
        engine = Engine.load(folder, plan, comm, options, device=torch.device("cpu"))
        return [prefill(engine, pictures, letters) for pictures, letters in runs]

    return run_ranks(body, "single", world_size=1)[0]


def test_memory_of_three_pictures_and_two_thousand_tokens_is_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a dense mask was built outside of a check")

    for module in (sequence, token_row):
        monkeypatch.setattr(module, "dense_mask", refuse)
    small, large = measure(tmp_path / "checkpoint", SPEC, [(1, 400), (3, 2000)], LoadOptions())
    assert large.length > 10_000
    # A bool mask over all pairs, or a dispatch of tokens x experts x capacity (at least length² x top-k elements), would be larger.
    assert large.nbytes < large.length**2, "not even one byte per pair of tokens"
    assert large.nbytes / small.nbytes < 1.2 * large.length / small.length
    for peak in (small, large):
        print(f"prefix of {peak.length} tokens: largest tensor {peak.nbytes / 1e6:.1f} MB")


@pytest.mark.parametrize("path", MOE_PATHS)
def test_no_tensor_has_a_place_for_every_expert_of_every_choice(path: MoePath, tmp_path: Path) -> None:
    """The router's logits are tokens x experts, a causal mask is rows x tokens for a bounded number of rows. A one-hot dispatch is top-k
    times the former, one with a place for every token and expert is far more."""
    spec = replace(SPEC, experts=256, expert_width=8)
    (peak,) = measure(tmp_path / "checkpoint", spec, [(1, 400)], LoadOptions(moe_path=path))
    allowed = max(spec.experts, spec.topk * spec.hidden, CAUSAL_ROWS)  # per token
    assert allowed < spec.topk * spec.experts, "or a one-hot dispatch could hide"
    assert peak.elements <= allowed * peak.length
