"""``bench denoise`` as a program, with toy sizes on the CPU: rows, JSON, refusals; the floor and the left-out collectives of the 80B sizes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from phase_parallel.bench.ar import TASKS, Task
from phase_parallel.bench.denoise import GuidedStep, image_rows
from phase_parallel.bench.denoise_cases import MOE_TABLE, PREFIXES, SCHEMES, DenoiseOptions, cases, choose_schemes
from phase_parallel.bench.denoise_costs import collectives_ms, convolution_flops, denoise_flops, floor_ms
from phase_parallel.bench.errors import BenchError
from phase_parallel.bench.kernel_groups import by_group
from phase_parallel.bench.one_rank import OneRankCommunicator, Transfer
from phase_parallel.bench.random_model import random_model
from phase_parallel.bench.release import SMALL, from_spec, release
from phase_parallel.launch.cli import main
from phase_parallel.models.hunyuan_image_3.loading import LoadOptions
from phase_parallel.models.hunyuan_image_3.model import HunyuanImage3Model

PROGRAM = ["bench", "denoise", "--device", "cpu", "--scale", "small", "--repeats", "1"]


def meta_model(scheme: str, layout: str = "micro_major") -> HunyuanImage3Model:
    """The 80B sizes with one layer and without values."""
    plan = SCHEMES[scheme].on(0)
    with torch.device("meta"):
        options = LoadOptions(moe_layout=layout)
        return random_model(release(layers=1).config, plan, OneRankCommunicator(plan), options, device=torch.device("meta"), fill=False)


def options_of(**changes: object) -> DenoiseOptions:
    settings = {"schemes": tuple(SCHEMES), "ranks": 0, "alone": True, "tasks": (), "cfg": (), "layouts": (), "paths": (), "experts": ()}
    settings |= {"moe_table": False, "sizes": False, "reduction": "auto"}
    return DenoiseOptions(**(settings | {"layers": 2, "small": True, "repeats": 1} | changes))


def test_table_of_one_rank_without_its_peers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "denoise.json"
    chosen = ["--scheme", "hybrid4-cfg", "--scheme", "tp2", "--moe-layout", "micro_major", "--moe-path", "multi_micro"]
    assert main([*PROGRAM, "--alone", *chosen, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {"hardware", "commit", "torch", "date", "alone", "layers", "ranks"} <= set(result)
    assert [(row["scheme"], row["task"], row["cfg"]) for row in result["rows"]] == [
        ("hybrid4-cfg", "t2i", "batched"),
        ("hybrid4-cfg", "ti2i", "batched"),
        ("tp2", "t2i", "batched"),
        ("tp2", "t2i", "serial"),
        ("tp2", "ti2i", "batched"),
        ("tp2", "ti2i", "serial"),
    ]
    for row in result["rows"]:
        assert row["ms_per_step"]["median"] > 0 and row["floor_ms"] > 0 and row["left_out_ms"] > 0
        assert row["prefix"] == {"t2i": 1251 // 8, "ti2i": 6290 // 8}[row["task"]]
        assert row["busiest_expert"] >= 1
    printed = capfd.readouterr().out
    assert "one rank without its peers" in printed and "is in no other number" in printed


def test_two_ranks_made_the_same_latent(tmp_path: Path) -> None:
    out = tmp_path / "denoise.json"
    assert main([*PROGRAM, "--ranks", "2", "--task", "t2i", "--cfg", "batched", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["scheme"] == "tp2" and row["left_out_ms"] == 0 and row["launch"] == "eager" and len(row["peak_gb_of_ranks"]) == 2
    assert row["ms_per_step"]["slowest_rank"] >= row["ms_per_step"]["median"] - 1e-6  # the ranks tell each other whole nanoseconds


@pytest.mark.ranks4
def test_four_ranks_of_every_scheme(tmp_path: Path) -> None:
    """The bench refuses rows whose ranks made different latents."""
    out = tmp_path / "denoise.json"
    one = ["--task", "t2i", "--cfg", "batched", "--moe-path", "multi_micro", "--moe-layout", "micro_major"]
    assert main([*PROGRAM, "--ranks", "4", *one, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["scheme"] for row in rows} == {"hybrid4-cfg", "hybrid4-ulysses", "hybrid4-kv_gather", "hybrid4-tp", "tp4"}


def test_rows_have_the_published_lengths() -> None:
    built = release(layers=2)
    for task in TASKS:
        rows = image_rows(built, task)
        assert rows.cond.prefix_length == rows.uncond.prefix_length == task.tokens
        assert rows.cond.gen.grid == (64, 64)


@pytest.mark.parametrize("scheme", ["hybrid4-cfg", "hybrid4-ulysses", "hybrid4-kv_gather", "hybrid4-tp", "tp4"])
def test_floor_is_that_of_the_research(scheme: str) -> None:
    """kernels.md section 7: 63.5 ms of products and 7.3 or 14.2 ms of attention a step, however four ranks share it."""
    model = meta_model(scheme)
    rows = 1 if scheme == "hybrid4-cfg" else 2
    for prefix, wanted in ((1251, 63.5 + 7.3), (6290, 63.5 + 14.2)):
        assert 32 * floor_ms(denoise_flops(model, rows, prefix, 4097)) == pytest.approx(wanted, rel=0.01)


def test_floor_does_not_depend_on_how_experts_lie() -> None:
    lying = [denoise_flops(meta_model("hybrid4-ulysses", layout), 2, 1251, 4097) for layout in ("micro_major", "expert_major")]
    assert lying[0] == lying[1]


def test_convolutions_are_counted_by_themselves() -> None:
    """3x3 products of 32→1024→4096→4096 channels with a 1x1 detour, and back from 4096→1024→1024→32 with one."""
    once = 9 * (32 * 1024 + 1024 * 4096 + 4096 * 4096) + 1024 * 4096
    back = 9 * (4096 * 1024 + 1024 * 1024 + 1024 * 32) + 4096 * 1024
    assert convolution_flops(meta_model("tp4"), 1, 2, 4096) == 2 * 4096 * (once + 2 * back)


@pytest.mark.parametrize(("nbytes", "wanted"), [(32 << 20, 136.0), (24 << 20, 105.5), (48 << 20, 197.0), (1, 75.0)])
def test_left_out_collectives_cost_what_was_measured(nbytes: int, wanted: float) -> None:
    assert collectives_ms({Transfer("all_reduce", 2, nbytes): 2}) == pytest.approx(2 * wanted / 1e3)


def test_a_collective_that_nobody_measured_has_no_cost() -> None:
    assert collectives_ms({Transfer("all_gather", 8, 1 << 20): 1}) is None


def test_what_is_left_out_is_what_a_step_exchanges() -> None:
    built, scheme = from_spec(SMALL), SCHEMES["hybrid4-ulysses"]
    plan = scheme.on(0)
    comm = OneRankCommunicator(plan)
    step = GuidedStep(random_model(built.config, plan, comm, LoadOptions(), device=torch.device("cpu")), built, TASKS[0], "batched")
    step("eager")  # computes the prefixes too
    comm.left_out.clear()
    step("eager")
    kinds = Counter()
    for transfer, count in comm.left_out.items():
        kinds[transfer.kind, transfer.ranks] += count
    assert kinds == {("all_reduce", 2): 2 * 2, ("all_to_all", 2): 2 * 2, ("all_gather", 2): 1}


def test_every_way_runs_once() -> None:
    """No case whose twin is there already."""
    listed = [(case.scheme.name, case.layout, case.path, mode) for case in cases(options_of()) for mode in case.cfg]
    assert len(set(listed)) == len(listed)
    assert [row[1:] for row in listed if row[0] == "tp4"] == [("micro_major", "multi_micro", "batched"), ("micro_major", "multi_micro", "serial")]
    assert {row[1:] for row in listed if row[0] == "hybrid4-ulysses"} == {
        ("micro_major", "multi_micro", "batched"),
        ("micro_major", "multi_micro", "serial"),
        ("micro_major", "two_dispatch", "batched"),
        ("expert_major", "multi_micro", "batched"),
    }
    assert {row[3] for row in listed if row[0] == "hybrid4-cfg"} == {"batched"}


def test_a_choice_leaves_the_others_out() -> None:
    listed = list(cases(options_of(layouts=("micro_major",), paths=("two_dispatch",), cfg=("serial",), schemes=("hybrid4-ulysses", "tp4"))))
    assert [(case.scheme.name, case.path, case.cfg) for case in listed] == [
        ("hybrid4-ulysses", "two_dispatch", ("serial",)),
        ("tp4", "multi_micro", ("serial",)),
    ]


def test_the_moe_table_is_those_rows() -> None:
    table = [(case.layout, case.path, case.experts) for case in cases(options_of(schemes=("hybrid4-cfg",), moe_table=True))]
    assert sorted(table) == sorted(MOE_TABLE) and table[-1][0] == "expert_major", "weights are made once for each layout"
    one_piece = cases(options_of(schemes=("tp2",), moe_table=True))
    assert [(case.path, case.experts) for case in one_piece] == [("multi_micro", "auto"), ("multi_micro", "flashinfer"), ("multi_micro", "grouped_mm")]


def test_choices_without_a_row_are_refused() -> None:
    with pytest.raises(BenchError, match="expert_major knows neither two_dispatch nor flashinfer"):
        cases(options_of(schemes=("hybrid4-cfg",), layouts=("expert_major",), experts=("flashinfer",)))


def test_moe_rows_of_one_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is not installed here says so in its row."""
    out = tmp_path / "moe.json"
    chosen = ["--moe-backend", "auto", "--moe-backend", "grouped_mm", "--moe-backend", "flashinfer", "--moe-path", "two_dispatch"]
    assert main([*PROGRAM, "--alone", "--scheme", "hybrid4-cfg", "--task", "t2i", "--moe-layout", "micro_major", *chosen, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["moe"] for row in rows] == [f"micro_major two_dispatch, {name}" for name in ("eager", "grouped_mm", "flashinfer")]
    assert rows[2]["not_run"] == "no CUDA device" and "flashinfer not run: no CUDA device" in capfd.readouterr().out
    assert rows[0]["digest"] != rows[1]["digest"], "other products round differently"


def test_flashinfer_alone_is_refused_where_it_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*PROGRAM, "--alone", "--scheme", "hybrid4-cfg", "--moe-layout", "micro_major", "--moe-backend", "flashinfer"]) == 1
    assert "moe_backend flashinfer cannot run here: no CUDA device" in capfd.readouterr().err


def test_pictures_and_prefixes_of_many_sizes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sizes.json"
    assert main([*PROGRAM, "--alone", "--scheme", "hybrid4-cfg", "--sizes", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    prefixes = [prefix // 16 for prefix in PREFIXES]
    assert [(row["height"], row["width"], row["image_tokens"], row["prefix"]) for row in rows] == [
        (h, w, h * w // 256, prefix) for h, w in ((64, 64), (128, 128), (128, 256)) for prefix in prefixes
    ]
    printed = capfd.readouterr().out
    assert "128 tokens hybrid4-cfg" in printed and "128 tokens 8 ranks" in printed and "*: predicted" in printed


def test_rows_of_another_size_have_the_same_prefix() -> None:
    built = release(layers=2)
    task = Task("sizes", 0, 10000)
    square, wide = image_rows(built, task), image_rows(built, task, (1024, 2048))
    assert wide.cond.gen.grid == (64, 128) and wide.cond.prefix_length == wide.uncond.prefix_length == 10000
    assert wide.cond.tokens[:10001] == square.cond.tokens[:10001]
    assert len(wide.cond) == len(square.cond) + 4096 and len(wide.cond.positions("joint_full")) == len(wide.cond)
    with pytest.raises(BenchError, match="a prefix of 20000 tokens needs a longer text than the bench has"):
        image_rows(built, Task("sizes", 0, 20000))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [(["--moe-table", "--moe-path", "two_dispatch"], "--moe-table chooses layouts"), (["--sizes", "--task", "t2i"], "--sizes measures prefixes of its own")],
)
def test_choices_that_exclude_each_other(chosen: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*PROGRAM, "--alone", *chosen]) == 1
    assert message in capfd.readouterr().err


def test_schemes_follow_the_ranks() -> None:
    assert choose_schemes((), 4, False) == ("hybrid4-cfg", "hybrid4-ulysses", "hybrid4-kv_gather", "hybrid4-tp", "tp4")
    assert "single" not in choose_schemes((), 0, True)
    assert choose_schemes(("single",), 0, True) == ("single",)
    with pytest.raises(BenchError, match="scheme tp4 does not run on 2 ranks; give --ranks 1, 2, 4, or --alone"):
        choose_schemes(("tp4",), 2, False)
    with pytest.raises(BenchError, match="no scheme runs on 3 ranks"):
        choose_schemes((), 3, False)


def test_kernels_are_grouped_by_what_they_are_for() -> None:
    split = {
        "_up_by_descriptors": 5.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": 4.0,
        "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN": 3.0,
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc": 2.5,
        "_combine": 2.0,
        "_reduce_rows": 1.5,
        "_residual_norm": 0.25,
        # PyTorch's grouped product on Hopper, as far as a name is kept.
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass:": 0.25,
        "Memcpy DtoD (Device -> Device)": 1.0,
        "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda(": 0.5,
    }
    assert by_group(split) == {
        "experts": 7.25, "attention": 4.0, "dense products": 3.0, "convolutions": 2.5, "collectives": 1.5, "copies": 1.0,
        "element-wise and other": 0.5, "rotary and norms": 0.25,
    }  # fmt: skip


def test_on_the_cpu_only_the_small_scale(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "denoise", "--device", "cpu"]) == 1
    assert "add --scale small" in capfd.readouterr().err
