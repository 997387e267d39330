"""The MODEL socket in hosts with flow sampling: the stock samplers step, one engine call per step runs on all
ranks.

Only rank 0 executes the graph, so whatever the sampler decides (batching, order, number of calls) is decided
once and sent with the call. Imported only where `host_compat.has_flow_sampling()` is true.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.model_patcher
import comfy.model_sampling
import comfy.patcher_extension
import comfy.supported_models_base
import torch

from . import host_compat
from .conditioning import RowConditioning, check_branch, check_latent, check_pair, find_row
from .denoise_call import DenoiseCall, no_uncond_text, show_words
from .engine_handle import EngineHandle
from .latent_preview import PreviewFactors

WRAPPER_KEY = "phase_parallel"
HANDLE_NAME = "row_handle"


class HunyuanImage3LatentFormat(comfy.latent_formats.LatentFormat):
    """LATENT holds what the VAE takes and gives; the sampler works on it times the VAE's scaling factor."""

    spacial_downscale_ratio = host_compat.LATENT_STRIDE

    def __init__(
        self, channels: int, scaling_factor: float, shift_factor: float | None, preview: PreviewFactors | None
    ) -> None:
        self.latent_channels = channels
        self.scale_factor = scaling_factor
        self.shift_factor = shift_factor or 0.0
        self.latent_rgb_factors = None if preview is None else preview.factors
        self.latent_rgb_factors_bias = None if preview is None else preview.bias

    def process_in(self, latent: torch.Tensor) -> torch.Tensor:
        return (latent - self.shift_factor) * self.scale_factor

    def process_out(self, latent: torch.Tensor) -> torch.Tensor:
        return latent / self.scale_factor + self.shift_factor


class HunyuanImage3Model(comfy.model_base.BaseModel):
    """ComfyUI's view of the network: flow matching, fp32 latents in and out, token rows named by int64
    handles.
    """

    def __init__(self, model_config: Any, engine: EngineHandle) -> None:
        super().__init__(model_config, model_type=comfy.model_base.ModelType.FLOW)
        self.engine = engine
        self.rows: OrderedDict[int, RowConditioning] = OrderedDict()
        self.diffusion_model = DenoiseCall(engine, self.rows)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Checks one conditioning against latent and checkpoint, and passes its row as an int64 handle [1,
        1].
        """
        where = kwargs.get("prompt_type", "positive")
        row = find_row(kwargs, where=where)
        check_branch(row, self.engine, where=where)
        check_latent(tuple(kwargs["noise"].shape), row)
        self.remember(row)
        return {HANDLE_NAME: comfy.conds.CONDRegular(torch.tensor([[row.handle]], dtype=torch.int64))}

    def remember(self, row: RowConditioning, *, limit: int = 64) -> None:
        """Keep a row for the steps of this sampling; the oldest of many is forgotten."""
        self.rows[row.handle] = row
        self.rows.move_to_end(row.handle)
        while len(self.rows) > limit:
            self.rows.popitem(last=False)

    def memory_required(self, input_shape: Any, cond_shapes: Any = None) -> float:
        """Constant, so that both branches of guidance always come in one call; activations are the engine's
        own business.
        """
        return 0.0


class EnginePatcher(comfy.model_patcher.ModelPatcher):
    """A ModelPatcher whose weights live elsewhere: a clone shares the engine, and weight patches are refused
    instead of ignored.
    """

    def model_size(self) -> int:
        return host_compat.NOMINAL_SIZE

    def model_patches_models(self) -> list[Any]:
        """What ComfyUI must keep while this is sampled: else it could unload the ranks' weights to make room for it."""
        residence = self.model.engine.residence
        return [*super().model_patches_models(), *([] if residence is None else [residence.patcher])]

    def add_patches(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "LoRA and other weight patches cannot be applied to HunyuanImage-3.0 yet, since its weights are "
            "split over the ranks; "
            "remove the LoRA loader."
        )


def check_sampling(
    executor: Any,
    noise: torch.Tensor,
    latent_image: torch.Tensor,
    sampler: Any,
    sigmas: torch.Tensor,
    denoise_mask: torch.Tensor | None = None,
    callback: Any = None,
    disable_pbar: bool = False,
    seed: int | None = None,
    **newer: Any,
) -> Any:
    """Wraps a whole sampling run: every refusal comes here, before memory is spent or a rank is called."""
    guider = executor.class_obj
    patcher = guider.model_patcher
    _check_patches(patcher)
    branches: dict[str, list[RowConditioning]] = {}
    for where, conds in guider.conds.items():
        branches[where] = [find_row(cond, where=where) for cond in conds]
        for row in branches[where]:
            check_branch(row, patcher.model.engine, where=where)
            check_latent(tuple(noise.shape), row)
    positive = branches.get("positive", [])
    negative = branches.get("negative", [])
    check_pair(positive, negative)
    # With cfg 1 ComfyUI does not run the negative; a guider without a cfg of its own is stopped when it does.
    if negative and negative[0].kind == "no_uncond" and getattr(guider, "cfg", 1.0) != 1.0:
        raise ValueError(no_uncond_text(negative[0]))
    node_id = host_compat.running_node_id()
    for references in {id(row.references): row.references for rows in branches.values() for row in rows}.values():
        if references is not None:
            references.encode(node_id=node_id, report=show_words(node_id))
    if positive:
        drawn = {"seed": seed, "steps": len(sigmas) - 1, "cfg": getattr(guider, "cfg", None)}
        host_compat.annotate({**positive[0].summary, **drawn}, node_id)
    return executor(noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed, **newer)


def _check_patches(patcher: comfy.model_patcher.ModelPatcher) -> None:
    """Raises ValueError for patches that the ranks would not see; ignored, they would draw wrongly."""
    options = patcher.model_options.get("transformer_options", {})
    if options.get("patches") or options.get("patches_replace"):
        raise ValueError(
            "A node between the loader and the sampler patches the model's attention or blocks, which "
            "HunyuanImage-3.0 does not have in this process; remove that node."
        )
    if not isinstance(patcher.get_model_object("model_sampling"), comfy.model_sampling.CONST):
        raise ValueError(
            "A node between the loader and the sampler sets a kind of sampling that is not flow matching; "
            "use ModelSamplingSD3 to change the shift, or remove that node."
        )


def build_flow_model(engine: EngineHandle) -> EnginePatcher:
    """A MODEL for the stock samplers. The flow shift is the checkpoint's; ModelSamplingSD3 changes it on a
    clone.
    """
    vae, generation = engine.config.vae, engine.config.generation
    model_config = comfy.supported_models_base.BASE({"disable_unet_model_creation": True})
    model_config.latent_format = HunyuanImage3LatentFormat(
        vae.latent_channels, vae.scaling_factor, vae.shift_factor, engine.preview
    )
    model_config.sampling_settings = {"shift": generation.flow_shift, "multiplier": 1000}
    patcher = EnginePatcher(
        HunyuanImage3Model(model_config, engine),
        load_device=host_compat.compute_device(),
        offload_device=host_compat.offload_device(),
        size=host_compat.NOMINAL_SIZE,
    )
    patcher.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, WRAPPER_KEY, check_sampling)
    return patcher
