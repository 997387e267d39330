"""Runs inside a process that has imported a real ComfyUI: our sockets in the hands of the stock nodes.

Prints one JSON object; test_stock_nodes.py judges it. Arguments: the ComfyUI, the pack, the golden folder.
"""
# ruff: noqa: E402 (ComfyUI parses sys.argv when it is imported)

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOST, PACK, GOLDEN = (Path(argument) for argument in sys.argv[1:4])
sys.path.insert(0, str(HOST))
sys.argv = ["main.py", "--cpu", "--preview-method", "latent2rgb"]

import comfy.options

comfy.options.enable_args_parsing()

import comfy.model_management
import comfy.model_patcher
import comfy.samplers
import folder_paths
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

import nodes

WATCHED = (comfy.model_management, comfy.model_patcher, comfy.samplers, folder_paths, nodes)


def core_functions() -> dict[str, int]:
    return {
        f"{module.__name__}.{name}": id(value)
        for module in WATCHED
        for name, value in vars(module).items()
        if callable(value)
    }


def import_pack(name: str) -> Any:
    """As ComfyUI imports it: by its path, under a name that only ComfyUI knows."""
    spec = importlib.util.spec_from_file_location(name, PACK / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


before = (core_functions(), list(sys.path), list(logging.getLogger().handlers))
pack = import_pack("some folder_x_name")
after = (core_functions(), list(sys.path), list(logging.getLogger().handlers))
OWN = pack.NODE_CLASS_MAPPINGS
inside = sys.modules


def part(name: str) -> Any:
    return inside[f"some folder_x_name.{name}"]


class QuietHost:
    interruption = KeyboardInterrupt

    def running_prompt(self) -> str | None:
        return "prompt"

    def cancelled(self) -> bool:
        return False

    def clear_cancel(self) -> None: ...


class CountingDriver:
    """The real driver of a world of one, with a list of what it was asked."""

    def __init__(self) -> None:
        cluster = part("parallel.cluster").Cluster.alone(torch.device("cpu"))
        self.cluster = cluster
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._driver = part("nodes.driver").Driver(cluster, QuietHost(), None)

    def call(self, op: str, args: dict[str, Any], tensors: Any = None, **options: Any) -> Any:
        self.calls.append((op.rpartition(".")[2], args))
        return self._driver.call(op, args, tensors, **options)


driver = CountingDriver()
part("nodes.node_loader").process_driver = lambda: driver

case = GOLDEN / "cases" / "base_t2i_wide_cfg"
expected = load_file(case / "expected.safetensors")
picture = np.array(Image.open(case / "image.png"), dtype=np.float32)
SCALE = 0.562679178327931
PROMPT = "a cat on the red mat"


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape, (got.shape, want.shape)
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def levels(image: torch.Tensor) -> float:
    """Largest distance to the golden 8-bit picture; rounding alone makes 0.5."""
    assert image.shape[0] == 1
    return float((image[0] * 255 - torch.from_numpy(picture)).abs().max())


def refusal(action: Callable[[], Any]) -> str:
    """The message of what `action` raises, with a remark if its type is not for people or if it came late."""
    asked = len(driver.calls)
    try:
        action()
    except Exception as problem:
        kind = "" if isinstance(problem, (ValueError, RuntimeError)) else f"{type(problem).__name__}: "
        called = "" if len(driver.calls) == asked else "after an engine call: "
        return kind + called + str(problem)
    return "nothing was raised"


def stock(name: str, **inputs: Any) -> Any:
    """Run a stock node, of either schema."""
    node = nodes.NODE_CLASS_MAPPINGS[name]
    if hasattr(node, "define_schema"):
        return node.execute(**inputs).args
    return getattr(node(), node.FUNCTION)(**inputs)


def load_stock_extras() -> None:
    """Only the two files whose nodes are used here; all of them take a minute to import."""
    for name in ("nodes_custom_sampler.py", "nodes_model_advanced.py"):
        started = nodes.load_custom_node(str(HOST / "comfy_extras" / name))
        loaded = asyncio.run(started) if inspect.isawaitable(started) else started
        assert loaded, f"{name} could not be loaded"


def imports() -> dict[str, Any]:
    return {
        "core_unchanged": before[0] == after[0],
        "path_unchanged": before[1] == after[1],
        "handlers_unchanged": before[2] == after[2],
        "folder_type": "hunyuan_image_3" in folder_paths.folder_names_and_paths,
        "nodes": sorted(OWN),
    }


def load(name: str = "tiny-base") -> tuple[Any, Any, Any]:
    return OWN["HunyuanImage3Loader"]().load(name, "auto", "auto")


def generate(model: Any, clip: Any, vae: Any) -> dict[str, Any]:
    graph: dict[str, Any] = {"5": {"class_type": "HunyuanImage3Generate", "inputs": {}}}
    image, text = OWN["HunyuanImage3Generate"]().generate(
        model, clip, vae, PROMPT, task="off", size="width x height", width=400, height=120,
        steps=4, guidance=5.0, seed=11, unique_id="5", graph=graph,
    )  # fmt: skip
    return {"levels": levels(image), "text": text, "metadata": graph["5"]["_meta"]["phase_parallel"]}


def vae_nodes(vae: Any) -> dict[str, Any]:
    latents = {"samples": expected["latent.final"] / SCALE}
    (image,) = nodes.VAEDecode().decode(vae, latents)
    (tiled,) = nodes.VAEDecodeTiled().decode(vae, latents, tile_size=256)
    (again,) = nodes.VAEEncode().encode(vae, image)
    foreign = {"samples": torch.ones(1, 4, 32, 32)}
    return {
        "decode": levels(image),
        "tiled_shape": list(tiled.shape),
        "encoded_shape": list(again["samples"].shape),
        "foreign_latent": refusal(lambda: nodes.VAEDecode().decode(vae, foreign)),
    }


def sample(model: Any, positive: Any, negative: Any, latent: Any, **changes: Any) -> torch.Tensor:
    options: dict[str, Any] = {
        "seed": 11, "steps": 4, "cfg": 5.0, "sampler_name": "euler", "scheduler": "simple",
    }  # fmt: skip
    options |= changes
    return nodes.KSampler().sample(model, positive=positive, negative=negative, latent_image=latent, **options)[0]["samples"]


def samplers(model: Any, clip: Any, vae: Any) -> dict[str, Any]:
    positive, negative, latent = OWN["HunyuanImage3Encode"]().encode(clip, vae, PROMPT, 400, 120)
    (noise,) = OWN["HunyuanImage3ReferenceNoise"]().make(11)
    (sigmas,) = stock("BasicScheduler", model=model, scheduler="simple", steps=4, denoise=1.0)
    (guider,) = stock("CFGGuider", model=model, positive=positive, negative=negative, cfg=5.0)
    (euler,) = stock("KSamplerSelect", sampler_name="euler")
    driver.calls.clear()
    advanced_inputs = {"noise": noise, "guider": guider, "sampler": euler, "sigmas": sigmas}
    advanced, _ = stock("SamplerCustomAdvanced", latent_image=latent, **advanced_inputs)
    asked = [(name, [(row["kind"], row["latent"]) for row in args["rows"]]) for name, args in driver.calls]
    two = {"samples": latent["samples"].repeat(2, 1, 1, 1)}
    batch, _ = stock("SamplerCustomAdvanced", latent_image=two, **advanced_inputs)
    plain = sample(model, positive, negative, latent)
    driver.calls.clear()
    sample(model, positive, negative, latent, cfg=1.0)
    unguided = [[row["kind"] for row in args["rows"]] for _, args in driver.calls]
    (shifted,) = stock("ModelSamplingSD3", model=model, shift=1.0)
    (factor,) = stock("ModelSamplingAuraFlow", model=model, shift=3.0)
    same = sample(factor, positive, negative, latent)
    (straight,) = stock("BasicScheduler", model=shifted, scheduler="simple", steps=4, denoise=1.0)
    painted = sample(model, positive, negative, {"samples": expected["latent.final"] / SCALE}, denoise=0.5)
    return {
        "sigmas": error(sigmas, expected["sigmas"]),
        "latent": error(advanced["samples"] * SCALE, expected["latent.final"]),
        "batch": error(batch["samples"][:1], advanced["samples"]),
        "batch_differs": not torch.equal(batch["samples"][0], batch["samples"][1]),
        "asked": asked,
        "unguided": unguided,
        "timestep_factor": error(same, plain),
        "straight": straight.tolist(),
        "shares_engine": shifted.model.engine is model.model.engine,
        "ksampler_finite": bool(torch.isfinite(plain).all()) and float(plain.std()) > 0,
        "image_to_image_finite": bool(torch.isfinite(painted).all()),
        "preview": list(preview(model, expected["latent.final"])),
    }


def preview(model: Any, latents: torch.Tensor) -> tuple[int, int]:
    import latent_preview

    previewer = latent_preview.get_previewer(torch.device("cpu"), model.model.latent_format)
    return previewer.decode_latent_to_preview_image("JPEG", latents)[1].size


def refusals(model: Any, clip: Any, vae: Any) -> dict[str, str]:
    positive, negative, latent = OWN["HunyuanImage3Encode"]().encode(clip, vae, PROMPT, 400, 120)
    other, _, _ = OWN["HunyuanImage3Encode"]().encode(clip, vae, "two dogs", 400, 120)
    foreign = [[torch.zeros(1, 77, 768), {"pooled_output": torch.zeros(1, 768)}]]
    (zeroed,) = stock("ConditioningZeroOut", conditioning=positive)
    (area,) = stock("ConditioningSetArea", conditioning=positive, width=64, height=64, x=0, y=0, strength=1.0)
    wrong_channels = {"samples": torch.ones(1, 4, 8, 27)}
    (wrong_stride,) = nodes.EmptyLatentImage().generate(1024, 512)
    wrong_stride.pop("downscale_ratio_spacial", None)
    patched = model.clone()
    patched.set_model_attn1_patch(lambda *arguments: arguments)
    (other_kind,) = stock("ModelSamplingDiscrete", model=model, sampling="v_prediction", zsnr=False)
    attempts: dict[str, Callable[[], Any]] = {
        "latent_channels": lambda: sample(model, positive, negative, wrong_channels),
        "latent_size": lambda: sample(model, positive, negative, wrong_stride),
        "foreign_negative": lambda: sample(model, positive, foreign, latent),
        "zeroed_negative": lambda: sample(model, positive, zeroed, latent),
        "exchanged": lambda: sample(model, negative, positive, latent),
        "unpaired": lambda: sample(model, other, negative, latent),
        "area": lambda: sample(model, area, negative, latent),
        "patched": lambda: sample(patched, positive, negative, latent),
        "sampling_kind": lambda: sample(other_kind, positive, negative, latent),
        "lora": lambda: model.clone().add_patches({"layer": ("diff", (torch.zeros(1),))}),
        "clip_text_encode": lambda: stock("CLIPTextEncode", clip=clip, text="a cat"),
    }
    return {name: refusal(attempt) for name, attempt in attempts.items()}


def distilled(model: Any, clip: Any, vae: Any) -> dict[str, Any]:
    """The stock sampler with a checkpoint that has no second branch."""
    positive, negative, latent = OWN["HunyuanImage3Encode"]().encode(clip, vae, PROMPT, 256, 256)
    (strong,) = OWN["HunyuanImage3Guidance"]().guide(positive, 4.0)
    driver.calls.clear()
    plain = sample(model, positive, negative, latent, steps=2, cfg=1.0)
    calls = [(args["guidance"], args["sigma_next"], [row["kind"] for row in args["rows"]]) for _, args in driver.calls]
    stronger = sample(model, strong, negative, latent, steps=2, cfg=1.0)
    return {
        "calls": calls,
        "finite": bool(torch.isfinite(plain).all()),
        "guidance_counts": not torch.equal(plain, stronger),
        "ksampler": refusal(lambda: sample(model, positive, negative, latent, steps=2, cfg=2.5)),
        "below_one": refusal(lambda: sample(model, positive, negative, latent, steps=2, cfg=0.5)),
        "twice": refusal(lambda: sample(model, positive, positive, latent, steps=2, cfg=2.5)),
    }


def without_flow(model: Any, clip: Any, vae: Any) -> dict[str, str]:
    positive, negative, latent = OWN["HunyuanImage3Encode"]().encode(clip, vae, PROMPT, 400, 120)
    return {"ksampler": refusal(lambda: sample(model, positive, negative, latent))}


def main() -> dict[str, Any]:
    load_stock_extras()
    with torch.inference_mode():
        model, clip, vae = load()
        flow = part("nodes.host_compat").has_flow_sampling()
        found = {"flow": flow, "imports": imports(), "generate": generate(model, clip, vae), "vae": vae_nodes(vae)}
        if flow:
            found |= {"samplers": samplers(model, clip, vae), "refusals": refusals(model, clip, vae)}
            found["distilled"] = distilled(*load("small-distil"))
        else:
            found["without_flow"] = without_flow(model, clip, vae)
    return found


print("\n" + json.dumps(main()), flush=True)
