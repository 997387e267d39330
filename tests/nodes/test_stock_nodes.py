"""Our MODEL, CLIP and VAE in the hands of a real ComfyUI's stock nodes, compared with the golden numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phase_parallel.launch.find_host import find_host

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
LIMIT = 1e-4
LEVELS = 0.51
"""Of 255: rounding to 8 bits alone makes 0.5."""

# One process does everything; the first test waits for it.
pytestmark = [pytest.mark.host, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(small_distil: Path) -> dict[str, Any]:
    host = find_host(print, comfy_dir=os.environ.get("COMFYUI_DIR"))
    program = Path(__file__).with_name("stock_nodes_program.py")
    environment = {
        **os.environ,
        "PHASE_PARALLEL_MODEL_DIRS": os.pathsep.join([str(GOLDEN / "checkpoints"), str(small_distil)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(program), str(host.root), str(ROOT), str(GOLDEN)],
        cwd=host.root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def with_flow(found: dict[str, Any]) -> dict[str, Any]:
    if not found["flow"]:
        pytest.skip("this ComfyUI has no flow sampling; set COMFYUI_DIR to a newer one")
    return found


def test_import_changes_nothing_in_the_host(found: dict[str, Any]) -> None:
    imports = found["imports"]
    assert imports["core_unchanged"] and imports["path_unchanged"] and imports["handlers_unchanged"]
    assert imports["folder_type"]
    assert "PhaseParallelFollower" not in imports["nodes"], "followers exist on ranks other than 0"


def test_generate_equals_the_official_picture(found: dict[str, Any]) -> None:
    assert found["generate"]["levels"] < LEVELS
    assert found["generate"]["text"] == ""


def test_generate_writes_what_it_resolved(found: dict[str, Any]) -> None:
    metadata = found["generate"]["metadata"]
    assert (metadata["width"], metadata["height"], metadata["seeds"]) == (432, 128, [11])
    assert (metadata["steps"], metadata["guidance"], metadata["flow_shift"]) == (4, 5.0, 3.0)
    assert metadata["prompt"] == "a cat on the red mat"


def test_vae_nodes(found: dict[str, Any]) -> None:
    vae = found["vae"]
    assert vae["decode"] < LEVELS
    assert vae["tiled_shape"] == [1, 128, 432, 3]
    assert vae["encoded_shape"] == [1, 16, 8, 27]
    assert vae["foreign_latent"].startswith("The latent has shape [1, 4, 32, 32]")


def test_stock_sampling_equals_the_official_loop(with_flow: dict[str, Any]) -> None:
    samplers = with_flow["samplers"]
    assert samplers["sigmas"] == 0
    assert samplers["latent"] < LIMIT
    assert samplers["ksampler_finite"] and samplers["image_to_image_finite"]


def test_a_batch_begins_with_the_same_picture(with_flow: dict[str, Any]) -> None:
    assert with_flow["samplers"]["batch"] < LIMIT
    assert with_flow["samplers"]["batch_differs"]


def test_both_branches_come_in_one_call_per_step(with_flow: dict[str, Any]) -> None:
    asked = with_flow["samplers"]["asked"]
    assert [name for name, _ in asked] == ["denoise"] * 4
    assert all(sorted(rows) == [["cond", 0], ["uncond", 0]] for _, rows in asked), "both name the one latent"


def test_cfg_of_one_skips_the_unconditional_branch(with_flow: dict[str, Any]) -> None:
    assert with_flow["samplers"]["unguided"] == [["cond"]] * 4


def test_shift_node_works_on_a_clone(with_flow: dict[str, Any]) -> None:
    assert with_flow["samplers"]["straight"] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert with_flow["samplers"]["shares_engine"]


def test_noise_level_does_not_depend_on_the_timestep_factor(with_flow: dict[str, Any]) -> None:
    assert with_flow["samplers"]["timestep_factor"] == 0


def test_live_preview_has_a_picture(with_flow: dict[str, Any]) -> None:
    assert with_flow["samplers"]["preview"] == [27, 8]


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        ("latent_channels", "The latent has 4 channels"),
        ("latent_size", "but the prompt was encoded for 432x128 pixels"),
        ("foreign_negative", "The negative conditioning was not made by"),
        ("zeroed_negative", "The negative conditioning was changed by another node"),
        ("exchanged", "exchange the two wires"),
        ("unpaired", "another prompt or size"),
        ("area", "carries an area"),
        ("patched", "patches the model's attention"),
        ("sampling_kind", "not flow matching"),
        ("lora", "LoRA and other weight patches cannot be applied"),
        ("clip_text_encode", "CLIP Text Encode cannot prepare a prompt"),
    ],
)
def test_refusals_come_before_any_engine_call(with_flow: dict[str, Any], attempt: str, words: str) -> None:
    message = with_flow["refusals"][attempt]
    assert words in message
    assert not message.startswith("after an engine call")


def test_distilled_checkpoint_is_sampled_with_one_branch(with_flow: dict[str, Any]) -> None:
    found = with_flow["distilled"]
    assert [(guidance, kinds) for guidance, _, kinds in found["calls"]] == [(2.5, ["cond"])] * 2
    assert [after for _, after, _ in found["calls"]] == [pytest.approx(0.75), 0.0], "the next noise level, which MeanFlow reads"
    assert found["finite"] and found["guidance_counts"]


@pytest.mark.parametrize("attempt", ["ksampler", "below_one"])
def test_distilled_checkpoint_refuses_a_cfg_before_any_engine_call(with_flow: dict[str, Any], attempt: str) -> None:
    message = with_flow["distilled"][attempt]
    assert "has no unconditional branch; set cfg to 1.0 and use HunyuanImage-3.0 Guidance" in message
    assert not message.startswith("after an engine call")


def test_distilled_checkpoint_knows_its_sockets(with_flow: dict[str, Any]) -> None:
    assert "exchange the two wires" in with_flow["distilled"]["twice"]


def test_old_host_is_pointed_to_generate(found: dict[str, Any]) -> None:
    if found["flow"]:
        pytest.skip("this ComfyUI has flow sampling")
    assert "use the HunyuanImage-3.0 Generate node" in found["without_flow"]["ksampler"]
