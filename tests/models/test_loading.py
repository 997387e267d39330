"""From a folder to a model on every rank: what is refused, when and in which words. What it costs: test_loading_memory.py."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from specs import ALL_PLANS
from thread_world import run_ranks

from phase_parallel.models.hunyuan_image_3.config import ConfigError, HunyuanImage3Config
from phase_parallel.models.hunyuan_image_3.loading import (
    LoadOptions,
    check_device_memory,
    check_folder,
    load_model,
    resolve_plan,
    trunk_dtype,
    weight_bytes,
)
from phase_parallel.parallel.checkpoint import Checkpoint, CheckpointError
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.plan import ParallelPlan, PlanError, make_plan
from phase_parallel.parallel.slicing import ShardingError

CPU = torch.device("cpu")


class NeverCalled(Communicator):
    """Any collective fails the test."""

    def __init__(self, plan: ParallelPlan):
        super().__init__(plan, ProcessGroups(plan, {}, None, "gloo"))

    def control_gather(self, values: object) -> NoReturn:
        pytest.fail("a collective before the folder was checked")


def load(folder: Path, plan: str = "hybrid4-ulysses", options: LoadOptions | None = None) -> object:
    own = make_plan(**ALL_PLANS[plan])
    return load_model(folder, own, NeverCalled(own), options or LoadOptions(), device=CPU)


@pytest.fixture
def folder(eight_ways: Path, tmp_path: Path) -> Path:
    """A copy, for tests that write into it."""
    for file in eight_ways.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def rewrite(folder: Path, key: str, value: torch.Tensor | None) -> None:
    """Another tensor under ``key``, or none."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = index["weight_map"][key]
    stored = load_file(folder / name)
    del stored[key]
    (folder / name).unlink()
    (folder / "model.safetensors.index.json").unlink()
    if value is None:
        del index["weight_map"][key]
    else:
        stored[key] = value
    save_file(stored, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read(folder: Path, key: str) -> torch.Tensor:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return load_file(folder / index["weight_map"][key])[key]


def change_config(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(values))


class TestRefusedBeforeACollective:
    def test_missing_shard(self, folder: Path) -> None:
        next(iter(sorted(folder.glob("*.safetensors")))).unlink()
        with pytest.raises(
            CheckpointError, match=r"^shard model-00001-of-\d+.safetensors is missing although .* names it; download it again"
        ):
            load(folder)

    def test_truncated_shard(self, folder: Path) -> None:
        shard = sorted(folder.glob("*.safetensors"))[-1]
        data = shard.read_bytes()[:-100]
        shard.unlink()
        shard.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"bytes but its header asks for \d+; the file is truncated, download it again"):
            load(folder)

    def test_unknown_key(self, folder: Path) -> None:
        change_config(folder, num_hidden_layers=1, moe_intermediate_size=[48], moe_topk=[2], num_shared_expert=[2])
        with pytest.raises(ShardingError, match=r"has \d+ keys that this model does not know, first model.layers.1"):
            load(folder)

    def test_missing_key(self, folder: Path) -> None:
        rewrite(folder, "model.ln_f.weight", None)
        with pytest.raises(ShardingError, match=r"lacks 1 keys that this model needs, first model.ln_f.weight; download"):
            load(folder)

    def test_wrong_shape(self, folder: Path) -> None:
        rewrite(folder, "model.ln_f.weight", torch.ones(32))
        with pytest.raises(ShardingError, match=r"^model.ln_f.weight has shape \[32\] but config.json asks for \[64\]"):
            load(folder)

    def test_checkpoint_that_is_sliced_already(self, folder: Path) -> None:
        key = "model.layers.0.self_attn.o_proj.weight"
        rewrite(folder, key, read(folder, key)[:, :128].contiguous())
        with pytest.raises(ShardingError, match=r"o_proj.weight has shape \[64, 128\] but config.json asks for \[64, 256\]"):
            load(folder)

    def test_quantised_weights(self, folder: Path) -> None:
        key = "model.layers.1.mlp.experts.3.down_proj.weight"
        rewrite(folder, key, read(folder, key).to(torch.float8_e4m3fn))
        with pytest.raises(CheckpointError, match=f"^{key} is stored as F8_E4M3; quantised checkpoints are not supported yet"):
            load(folder)

    def test_wrong_architecture(self, folder: Path) -> None:
        change_config(folder, architectures=["LlamaForCausalLM"], model_type="llama")
        with pytest.raises(ConfigError, match="LlamaForCausalLM"):
            load(folder)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_key_value_heads": 2}, "num_key_value_heads 2 cannot be split over tensor_parallel 4 .*; choose 1 or 2 ranks"),
            ({"vocab_size": 190}, "vocab_size 190 cannot be split over tensor_parallel 4 .*; choose 1 or 2 ranks"),
            ({"moe_intermediate_size": [48, 42]}, "moe_intermediate_size of layer 1 42 cannot be split over tensor_parallel 4"),
        ],
    )
    def test_sizes_that_do_not_divide(self, folder: Path, change: dict, message: str) -> None:
        change_config(folder, **change)
        with pytest.raises(PlanError, match=message):
            load(folder)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("key", ["lm_head.weight", "model.layers.1.mlp.experts.5.down_proj.weight", "vae.decoder.conv_out.bias"])
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_nan_or_infinity(self, folder: Path, key: str, value: float, dtype: str) -> None:
        damaged = read(folder, key)
        damaged.reshape(-1)[0] = value
        rewrite(folder, key, damaged)
        with pytest.raises(CheckpointError, match=r"^weights of .* hold NaN or infinity; the checkpoint is damaged, download it again$"):
            load(folder, options=LoadOptions(dtype))

    def test_opposite_infinities_do_not_cancel(self, folder: Path) -> None:
        damaged = read(folder, "model.ln_f.weight")
        damaged[:2] = torch.tensor([math.inf, -math.inf])
        rewrite(folder, "model.ln_f.weight", damaged)
        with pytest.raises(CheckpointError, match="weights of ln_f hold NaN or infinity"):
            load(folder)

    def test_device_that_is_too_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80_000_000_000, 85_000_000_000))
        plan = make_plan("hybrid", world_size=4, rank=3)
        check_device_memory(torch.device("cuda", 0), 70_000_000_000, plan)
        check_device_memory(CPU, 10**15, plan)
        with pytest.raises(
            CheckpointError,
            match=r"^rank 3 needs 89.2 GB for plan hybrid but 80.0 GB of its GPU are free; close other programs, or choose plan tp",
        ):
            check_device_memory(torch.device("cuda", 0), 87_100_000_000, plan)

    def test_check_folder_finds_the_same_without_loading(self, folder: Path) -> None:
        plan = make_plan("hybrid", world_size=4)
        split, replicated = check_folder(folder, plan, LoadOptions())
        assert split > 0 and replicated > 0
        rewrite(folder, "model.ln_f.weight", torch.ones(32))
        with pytest.raises(ShardingError, match=r"model.ln_f.weight has shape"):
            check_folder(folder, plan, LoadOptions())


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(weight_dtype="fp8"), "unknown weight dtype 'fp8'; choose one of auto, bf16, fp32"),
            (dict(moe_layout="rows"), "unknown MoE layout 'rows'; choose one of micro_major, expert_major"),
            (dict(moe_path="fused"), "unknown MoE path 'fused'; choose one of multi_micro, two_dispatch"),
            (dict(moe_layout="expert_major", moe_path="two_dispatch"), "which expert_major has merged; choose micro_major"),
        ],
    )
    def test_refused(self, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            LoadOptions(**options)

    @pytest.mark.parametrize(
        ("stored", "choice", "dtype"),
        [
            ("bfloat16", "auto", torch.bfloat16),
            ("float32", "auto", torch.float32),
            ("float32", "bf16", torch.bfloat16),
            ("bfloat16", "fp32", torch.float32),
        ],
    )
    def test_dtype_of_the_trunk(self, eight_ways: Path, stored: str, choice: str, dtype: torch.dtype) -> None:
        config = replace(HunyuanImage3Config.from_folder(eight_ways), dtype=stored)
        assert trunk_dtype(config, choice) == dtype

    def test_router_and_vae_stay_fp32(self, eight_ways: Path) -> None:
        model = load(eight_ways, "single", LoadOptions("bf16"))
        weights = model.weights["denoise"]
        assert {layer.router.dtype for layer in weights.layers} == {torch.float32}
        assert {p.dtype for p in model.around.vae.parameters()} == {torch.float32}
        assert weights.wte.tensor.dtype == model.around.patch_embed.model[0].weight.dtype == torch.bfloat16


class TestReplicas:
    def test_equal_folders_pass_on_all_ranks(self, eight_ways: Path) -> None:
        def body(plan: ParallelPlan, comm: Communicator) -> int:
            return load_model(eight_ways, plan, comm, LoadOptions(), device=CPU).plan.rank

        assert run_ranks(body, **ALL_PLANS["hybrid4-ulysses"]) == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("key", "element", "name", "ranks"),
        [
            # Shard 1 holds the last column, so rank 3 differs from rank 1; a norm is on all ranks.
            ("model.layers.0.self_attn.o_proj.weight", -1, "layers.0.o_proj", (3, 1)),
            ("model.layers.1.input_layernorm.weight", 0, "layers.1.input_layernorm", (3, 0)),
        ],
    )
    def test_other_weights_on_one_rank_are_found_on_every_rank(
        self, folder: Path, eight_ways: Path, key: str, element: int, name: str, ranks: tuple[int, int]
    ) -> None:
        changed = read(folder, key)
        changed.reshape(-1)[element] += 1e-3
        rewrite(folder, key, changed)

        def body(plan: ParallelPlan, comm: Communicator) -> str:
            try:
                load_model(folder if plan.rank == 3 else eight_ways, plan, comm, LoadOptions(), device=CPU)
            except CheckpointError as error:
                return str(error)
            return ""

        sentence = (
            f"rank {ranks[0]} read other weights for {name} than rank {ranks[1]}; the model folders of the ranks differ, use one folder"
        )
        assert run_ranks(body, **ALL_PLANS["hybrid4-ulysses"]) == [sentence] * 4


class TestPlanChoice:
    def resolve(self, folder: Path, **choices: object) -> tuple[str, str]:
        plan, reason = resolve_plan(folder, **{"world_size": 4, "free_bytes_per_rank": 10**9} | choices)
        return plan.describe(), reason

    def test_auto_follows_memory(self, eight_ways: Path) -> None:
        split, replicated = weight_bytes(HunyuanImage3Config.from_folder(eight_ways), "auto")
        assert self.resolve(eight_ways)[0] == "hybrid: AR TP4 · denoise TP2×SP2 (ulysses)"
        assert self.resolve(eight_ways, free_bytes_per_rank=replicated + split // 2 - 1)[0] == "tp: AR TP4 · denoise TP4"
        with pytest.raises(PlanError, match="free memory, or start more ranks"):
            self.resolve(eight_ways, free_bytes_per_rank=replicated)

    def test_bytes_depend_on_the_dtype_and_add_up(self, eight_ways: Path) -> None:
        config = HunyuanImage3Config.from_folder(eight_ways)
        wide, narrow = weight_bytes(config, "fp32"), weight_bytes(config, "bf16")
        assert wide[0] == 2 * narrow[0] and narrow[1] < wide[1]
        unused = sum(
            Checkpoint(eight_ways).tensors[key].shape[0] >= 0 for key in Checkpoint(eight_ways).tensors if "vision_model.head" in key
        )
        assert unused == 11
        head = sum(4 * math.prod(info.shape) for key, info in Checkpoint(eight_ways).tensors.items() if "vision_model.head" in key)
        assert sum(wide) == Checkpoint(eight_ways).bytes_on_disk() - head

    @pytest.mark.parametrize(
        ("choices", "text"),
        [
            (dict(name="hybrid", denoise="cfg"), "hybrid: AR TP4 · denoise TP2×CFG2"),
            (dict(name="hybrid", attention="kv_gather"), "hybrid: AR TP4 · denoise TP2×SP2 (kv_gather)"),
            (dict(denoise="cfg"), "hybrid: AR TP4 · denoise TP2×CFG2"),
            (dict(name="tp"), "tp: AR TP4 · denoise TP4"),
            (dict(world_size=1), "single: one rank"),
            (dict(at_start="tp"), "tp: AR TP4 · denoise TP4"),
            (dict(at_start="tp", name="hybrid"), "hybrid: AR TP4 · denoise TP2×SP2 (ulysses)"),
        ],
    )
    def test_choices_of_the_loader(self, eight_ways: Path, choices: dict, text: str) -> None:
        assert self.resolve(eight_ways, **choices)[0] == text

    def test_auto_attention_gathers_heads_that_cannot_be_exchanged(self, eight_ways: Path) -> None:
        """Two machines of eight ranks each: a rank has one head of the release's eight."""
        choices = {"world_size": 16, "free_bytes_per_rank": 10**9, "name": "replicated"}
        plan, _ = resolve_plan(eight_ways, **choices)
        assert plan.describe_denoise() == "TP8×SP2 (kv_gather)"
        check_folder(eight_ways, plan, LoadOptions())
        fixed, _ = resolve_plan(eight_ways, **choices, attention="ulysses")
        with pytest.raises(PlanError, match="num_key_value_heads 8 cannot be split over the heads of 16"):
            check_folder(eight_ways, fixed, LoadOptions())

    def test_what_the_launch_was_asked_for_is_said(self, eight_ways: Path) -> None:
        assert self.resolve(eight_ways, at_start="tp")[1] == "tp: chosen at start"

    @pytest.mark.parametrize(
        ("choices", "message"),
        [
            (
                dict(name="tp", denoise="sp"),
                r"denoise sp needs plan hybrid or replicated, and the plan is tp \(tp: chosen in the loader\); set denoise to auto",
            ),
            (dict(world_size=2, denoise="cfg"), r"denoise cfg needs plan hybrid or replicated, and the plan is tp \(tp: 2 ranks are too few"),
            (dict(name="single"), "plan single uses 1 rank but 4 are running"),
            (dict(name="hybrid", world_size=2), "plan hybrid needs 4 or more ranks but 2 are running"),
        ],
    )
    def test_choices_that_do_not_fit(self, eight_ways: Path, choices: dict, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            self.resolve(eight_ways, **choices)
