"""Load HunyuanImage-3.0: from a checkpoint folder to the three sockets of ComfyUI, on all ranks."""

from __future__ import annotations

from typing import Any

from ..kernels.kernel_set import KERNEL_CHOICES, MOE_BACKENDS
from ..kernels.moe import MOE_LAYOUTS, MOE_PATHS
from ..models.hunyuan_image_3 import random_weights
from ..models.hunyuan_image_3.topology_choice import TopologyWish
from ..parallel.plan import ATTENTION_KINDS, DENOISE_KINDS, PLAN_NAMES
from . import checkpoint_folders, host_compat, inputs, plan_choice
from .driver import process_driver
from .engine_handle import EngineChoice, EngineHandle
from .latent_preview import PreviewFactors, fit_factors
from .model_socket import build_model
from .progress import NodeProgress
from .residence import process_residence
from .text_socket import HunyuanText
from .vae_socket import HunyuanVae

AUTO = "auto"


class HunyuanImage3Loader:
    DESCRIPTION = (
        "Loads a HunyuanImage-3.0 checkpoint folder as downloaded. With several ranks every GPU reads only "
        "its own part of the weights, "
        "once; text and picture then run on the same resident weights."
    )
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    OUTPUT_TOOLTIPS = (
        "For KSampler and the other stock samplers, and for Generate.",
        "For Think / Recaption, Encode and Generate.",
        "For VAE Decode, VAE Encode, Encode and Generate.",
    )
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "folder": (
                    checkpoint_folders.checkpoint_names(),
                    {
                        "tooltip": "A checkpoint folder (config.json, model.safetensors.index.json and its "
                        "shards) in models/hunyuan_image_3 "
                        "or in a folder that the launcher was given."
                    },
                ),
                "weight_dtype": (
                    [AUTO, "bf16", "fp32"],
                    {
                        "default": AUTO,
                        "tooltip": "Precision of the weights on the GPU. 'auto' follows the checkpoint's "
                        "config.json.",
                    },
                ),
                "plan": (
                    [AUTO, *PLAN_NAMES],
                    {
                        "default": AUTO,
                        "tooltip": "How the ranks share the weights. 'hybrid': two or more copies, fastest. "
                        "'tp': one copy over all GPUs, "
                        "least memory. 'replicated': two or more copies that write text alone, for several machines. "
                        "'single': one GPU. 'auto' is what `up --plan` says, or else chosen by the number of "
                        "ranks and their memory; the node shows which.",
                    },
                ),
            },
            "optional": _expert_inputs(),
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def IS_CHANGED(cls, folder: str, **options: Any) -> str:
        return checkpoint_folders.fingerprint(checkpoint_folders.checkpoint_folder(folder))

    def load(
        self,
        folder: str,
        weight_dtype: str,
        plan: str,
        denoise: str = AUTO,
        attention: str = AUTO,
        moe_layout: str = MOE_LAYOUTS[0],
        moe_path: str = MOE_PATHS[0],
        kernels: str = KERNEL_CHOICES[0],
        moe_backend: str = MOE_BACKENDS[0],
        unique_id: str | None = None,
    ) -> tuple[Any, HunyuanText, HunyuanVae]:
        path = str(checkpoint_folders.checkpoint_folder(folder))
        driver = process_driver()
        chosen, reason = plan_choice.choose(
            driver.cluster,
            folder=path,
            name=plan,
            denoise=denoise,
            attention=attention,
            weight_dtype=weight_dtype,
        )
        choice = EngineChoice(path, chosen, weight_dtype, moe_layout, moe_path, kernels, moe_backend)
        wish = TopologyWish(None if denoise == AUTO else denoise, None if attention == AUTO else attention)
        engine = EngineHandle(choice, driver, reason=reason, residence=process_residence(driver), wish=wish)
        loaded, _ = engine.call("load", {}, {}, node_id=unique_id, report=NodeProgress(unique_id))
        vae = HunyuanVae(engine)
        engine.preview = _preview(engine, vae)
        lines = (weights_words(path), f"{engine.plan_words()} ({reason})", backend_words(loaded["measured"]), sampler_hint(engine))
        host_compat.show_text("\n".join(line for line in lines if line), unique_id)
        return build_model(engine), HunyuanText(engine), vae


def weights_words(folder: str) -> str:
    """What a user must know of the weights themselves; empty for a checkpoint with files."""
    return random_weights.NOTE if random_weights.declared(folder) else ""


def backend_words(measured: dict[str, str]) -> str:
    """Which kernels run on this rank, who computes the experts, how text is written and how a drawing adds up, with the reasons that the engine gave."""
    return f"kernels {measured['kernels']}; experts {measured['moe']}; text {measured['decode']}; picture sums {measured['rows']}"


def sampler_hint(engine: EngineHandle) -> str:
    """The checkpoint's own sampler settings, in words."""
    own = engine.config.generation
    if engine.config.cfg_distilled:
        return (
            f"distilled: sample with {own.diff_infer_steps} steps and cfg 1; its guidance "
            f"({own.diff_guidance_scale:g}) is set with HunyuanImage-3.0 Guidance"
        )
    return f"sample with {own.diff_infer_steps} steps and cfg {own.diff_guidance_scale:g}"


def _expert_inputs() -> dict[str, inputs.Widget]:
    """Choices for people who measure; none changes the picture."""
    return {
        "denoise": (
            # 'tp' is the newest, and the plan's only way where there is one copy.
            [AUTO, *(kind for kind in DENOISE_KINDS if kind != "tp"), "tp"],
            {
                "default": AUTO,
                "advanced": True,
                "tooltip": "Plans 'hybrid' and 'replicated': the copies share one picture's tokens ('sp'), each "
                "takes one branch of guidance ('cfg'), or both ('cfg_sp'); in 'hybrid' all ranks can also stay one group ('tp'). "
                "'auto' takes for each run what was measured fastest, and the node that draws shows which.",
            },
        ),
        "attention": (
            [AUTO, *ATTENTION_KINDS],
            {
                "default": AUTO,
                "advanced": True,
                "tooltip": "With 'sp': how attention sees all tokens, by exchanging heads "
                "('ulysses') or by gathering keys and "
                "values ('kv_gather'). Same picture. 'auto' takes what was measured fastest.",
            },
        ),
        "moe_layout": (
            list(MOE_LAYOUTS),
            {
                "default": MOE_LAYOUTS[0],
                "advanced": True,
                "tooltip": "Order of the expert weights in memory; for speed comparisons. Same picture.",
            },
        ),
        "moe_path": (
            list(MOE_PATHS),
            {
                "default": MOE_PATHS[0],
                "advanced": True,
                "tooltip": "How the experts' two halves are computed; for speed comparisons. Same picture.",
            },
        ),
        "kernels": (
            list(KERNEL_CHOICES),
            {
                "default": KERNEL_CHOICES[0],
                "advanced": True,
                "tooltip": "'auto': fast GPU kernels for the experts, attention and the model's text where they run, else "
                "PyTorch alone; the node shows which. 'eager': PyTorch alone, much slower. 'fused': refuse to run without them.",
            },
        ),
        # New ones go last, so that the widgets of saved workflows keep their places.
        "moe_backend": (
            list(MOE_BACKENDS),
            {
                "default": MOE_BACKENDS[0],
                "advanced": True,
                "tooltip": "Who computes the routed experts. 'auto': as 'kernels' says. 'triton': refuse to run without this pack's GPU kernels. "
                "'flashinfer': the FlashInfer library, which measures its kernels for half a minute or more while loading; for comparisons.",
            },
        ),
    }


def _preview(engine: EngineHandle, vae: HunyuanVae) -> PreviewFactors:
    own = engine.config.vae
    return fit_factors(vae.encode_pixels, scale=own.scaling_factor, shift=own.shift_factor or 0.0)
