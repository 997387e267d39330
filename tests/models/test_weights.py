"""Views of one set of resident tensors for each phase: nothing is copied, and together the micro views are the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from specs import ALL_PLANS, EIGHT_WAYS

from phase_parallel.kernels.kernel_set import EAGER, FUSED
from phase_parallel.kernels.moe import MOE_LAYOUTS, MoeLayout
from phase_parallel.models.hunyuan_image_3.config import HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.loading import kind_dtypes
from phase_parallel.models.hunyuan_image_3.sharding import sharding_table
from phase_parallel.models.hunyuan_image_3.synthetic import write_settings
from phase_parallel.models.hunyuan_image_3.transformer import TrunkWeights
from phase_parallel.models.hunyuan_image_3.weights import around_modules, expert_blocks, order_convolutions, phase_weights
from phase_parallel.parallel.checkpoint import allocate
from phase_parallel.parallel.plan import PHASES, ParallelPlan, make_plan

Resident = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> HunyuanImage3Config:
    return write_settings(tmp_path_factory.mktemp("weights") / "folder", EIGHT_WAYS)[0]


def resident_of(config: HunyuanImage3Config, plan: ParallelPlan, layout: MoeLayout) -> tuple[Resident, dict[str, str]]:
    table = sharding_table(config, plan, layout)
    resident = allocate(table, kind_dtypes(torch.float32), torch.device("cpu"))
    for number, name in enumerate(sorted(resident)):
        resident[name].copy_(torch.arange(resident[name].numel()).reshape(resident[name].shape) + 1000.0 * number)
    return resident, {name: target.kind for name, target in table.targets.items()}


def tensors(weights: TrunkWeights) -> Resident:
    found = {"wte": weights.wte.tensor, "lm_head": weights.lm_head.tensor, "ln_f": weights.ln_f}
    for layer in weights.layers:
        at = layer.site
        for field in ("qkv_proj", "o_proj", "shared_gate_and_up", "shared_down"):
            found[f"{at}.{field}"] = getattr(layer, field).tensor
        for field in ("input_layernorm", "query_layernorm", "key_layernorm", "post_attention_layernorm", "router"):
            found[f"{at}.{field}"] = getattr(layer, field)
        for number, block in enumerate(layer.experts):
            found |= {f"{at}.experts_w1/{number}": block.w1, f"{at}.experts_w2/{number}": block.w2}
    return found


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
@pytest.mark.parametrize("plan", ["single", "tp4", "hybrid4-ulysses", "hybrid8-s2-ulysses", "hybrid8-s4-cfg"])
@pytest.mark.parametrize("phase", PHASES)
def test_every_tensor_of_a_phase_lies_inside_a_resident_one(config: HunyuanImage3Config, plan: str, layout: MoeLayout, phase: str) -> None:
    own = make_plan(**ALL_PLANS[plan]).on_rank(ALL_PLANS[plan]["world_size"] - 1)
    resident, _ = resident_of(config, own, layout)
    for name, view in tensors(phase_weights(config, own, resident, phase=phase, layout=layout, path="multi_micro")).items():
        parent = resident[name.partition("/")[0]]
        start = view.data_ptr() - parent.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) * view.element_size()
        assert view.untyped_storage().data_ptr() == parent.untyped_storage().data_ptr(), name
        assert start >= 0 and start + last < parent.nbytes, name
        if own.micro_count > 1 and phase != "denoise" and view.shape != parent.shape:
            assert start == 0 or own.micro > 0, name


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
@pytest.mark.parametrize("plan", ["hybrid4-ulysses", "hybrid8-s2-ulysses"])
def test_micro_views_of_all_replicas_are_the_shard(config: HunyuanImage3Config, plan: str, layout: MoeLayout) -> None:
    """Replicas hold equal bits, so the views of all of them, laid side by side, give the shard that denoise uses."""
    first = make_plan(**ALL_PLANS[plan])
    ranks = [first.on_rank(rank) for rank in first.on_rank(1).replica_ranks]
    resident, _ = resident_of(config, ranks[0], layout)
    micro = [phase_weights(config, own, resident, phase="decode", layout=layout, path="multi_micro") for own in ranks]
    whole = phase_weights(config, ranks[0], resident, phase="denoise", layout=layout, path="multi_micro")
    for number, layer in enumerate(whole.layers):
        views = [weights.layers[number] for weights in micro]
        assert all(view.shared_micros == 1 for view in views) and layer.shared_micros == len(ranks)
        for field, dim in (("qkv_proj", 0), ("shared_gate_and_up", 0), ("o_proj", 1), ("shared_down", 1)):
            joined = torch.cat([getattr(view, field).tensor for view in views], dim=dim)
            assert torch.equal(joined, getattr(layer, field).tensor), field
        w1 = torch.cat([view.experts[0].w1 for view in views], dim=1)
        w2 = torch.cat([view.experts[0].w2 for view in views], dim=2)
        assert torch.equal(w1, torch.cat([block.w1 for block in layer.experts], dim=1))
        assert torch.equal(w2, torch.cat([block.w2 for block in layer.experts], dim=2))
    starts = [weights.vocab_start for weights in micro]
    rows = micro[0].wte.tensor.shape[0]
    assert starts == [whole.vocab_start + m * rows for m in range(len(ranks))]
    assert torch.equal(torch.cat([weights.wte.tensor for weights in micro]), whole.wte.tensor)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("plan", ["tp8", "hybrid8-s4-ulysses", "hybrid4-cfg"])
def test_vocabulary_rows_of_all_ranks(config: HunyuanImage3Config, plan: str, phase: str) -> None:
    first = make_plan(**ALL_PLANS[plan])
    covered = []
    for own in (first.on_rank(rank) for rank in first.topology(phase).tp_ranks):
        resident, _ = resident_of(config, own, "micro_major")
        weights = phase_weights(config, own, resident, phase=phase, layout="micro_major", path="multi_micro")
        covered += range(weights.vocab_start, weights.vocab_start + weights.wte.tensor.shape[0])
    assert covered == list(range(config.vocab_size)), "in the order of the gather"


def test_row_parallel_micro_views_keep_the_leading_dimension(config: HunyuanImage3Config) -> None:
    own = make_plan("hybrid", world_size=4, rank=2)
    resident, _ = resident_of(config, own, "expert_major")
    layer = phase_weights(config, own, resident, phase="prefill", layout="expert_major", path="multi_micro").layers[0]
    for view, parent in ((layer.o_proj.tensor, "o_proj"), (layer.shared_down.tensor, "shared_down"), (layer.experts[0].w2, "experts_w2")):
        assert view.stride() == resident[f"layers.0.{parent}"].stride() and not view.is_contiguous()
        assert view.shape[-1] * 2 == resident[f"layers.0.{parent}"].shape[-1]


def test_blocks_by_layout() -> None:
    micro_major = torch.zeros(2, 3, 8, 5), torch.zeros(2, 3, 5, 4)
    assert [block.micros for block in expert_blocks(*micro_major, "micro_major", None, 2)] == [1, 1]
    (one,) = expert_blocks(*micro_major, "micro_major", 1, 2)
    assert one.w1.data_ptr() == micro_major[0][1].data_ptr() and one.w1.is_contiguous()
    expert_major = torch.zeros(3, 16, 5), torch.zeros(3, 5, 8)
    (whole,) = expert_blocks(*expert_major, "expert_major", None, 2)
    assert whole.micros == 2 and whole.w1 is expert_major[0]
    (view,) = expert_blocks(*expert_major, "expert_major", 1, 2)
    assert view.w1.shape == (3, 8, 5) and view.w1.stride() == (80, 5, 1) and view.w2.stride() == (40, 8, 1)


def test_modules_around_the_trunk_are_the_resident_tensors(config: HunyuanImage3Config) -> None:
    resident, kinds = resident_of(config, make_plan("tp", world_size=2), "micro_major")
    modules = around_modules(config, resident, kinds)
    parameters = dict(modules.named_parameters())
    assert parameters.keys() == {name for name, kind in kinds.items() if kind in ("around", "vae")}
    for name, parameter in parameters.items():
        assert parameter.data_ptr() == resident[name].data_ptr() and not parameter.requires_grad
    assert not any(buffer.is_meta for buffer in modules.buffers())
    assert not modules.training


def test_ordered_convolutions_keep_their_values(config: HunyuanImage3Config) -> None:
    plan = make_plan("single", world_size=1)
    plain, kinds = resident_of(config, plan, "micro_major")
    ordered, _ = resident_of(config, plan, "micro_major")
    order_convolutions(ordered, kinds)
    turned = {name for name in plain if ordered[name].stride() != plain[name].stride()}
    assert "patch_embed.model.1.out_layers.3.weight" in turned and "final_layer.model.1.2.weight" in turned
    assert not any(name.startswith("vae.") for name in turned)
    assert all(torch.equal(ordered[name], plain[name]) for name in plain)
    assert all(ordered[name].is_contiguous(memory_format=torch.channels_last) for name in turned)


def test_missing_module_weight_is_an_error(config: HunyuanImage3Config) -> None:
    resident, kinds = resident_of(config, make_plan("single", world_size=1), "micro_major")
    del resident["patch_embed.model.0.bias"]
    with pytest.raises(RuntimeError, match=r"patch_embed.model.0.bias"):
        around_modules(config, resident, kinds)


def test_distilled_checkpoints_have_two_embedders_more(tmp_path: Path) -> None:
    config, _ = write_settings(tmp_path / "distil", replace(EIGHT_WAYS, kind="distil"))
    resident, kinds = resident_of(config, make_plan("single", world_size=1), "micro_major")
    modules = around_modules(config, resident, kinds)
    assert modules.guidance_emb is not None and modules.timestep_r_emb is not None


def test_norms_before_the_convolutions_are_those_of_the_kernels(config: HunyuanImage3Config) -> None:
    resident, kinds = resident_of(config, make_plan("single", world_size=1), "micro_major")
    modules = around_modules(config, resident, kinds, FUSED)
    blocks = [modules.patch_embed.model[1], modules.final_layer.model[0]]
    assert [block.norm_silu for block in blocks] == [FUSED.norm_silu] * 2
    assert around_modules(config, resident, kinds).patch_embed.model[1].norm_silu is EAGER.norm_silu
