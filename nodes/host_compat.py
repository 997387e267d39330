"""Every difference between the ComfyUI versions this pack runs in, and the only place that knows one.

Tested hosts: March 2024 (no flow sampling, no execution context, no progress text), 0.3.64 and 0.26. A
capability is looked for, never a version number. Functions that need a running server answer with None
outside of one, so the nodes can be called from tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NOMINAL_SIZE = 1 << 20
"""Bytes ComfyUI is told that a model of ours has: it makes room for one before loading it. The weights belong to the
engine; nothing in ComfyUI can move, offload or load them in part.
"""

LATENT_STRIDE = 16
"""Picture pixels per latent pixel of HunyuanImage-3.0 (ComfyUI's own default is 8)."""


def has_flow_sampling() -> bool:
    """True when the host can sample a flow-matching model and lets a pack wrap a sampling run."""
    import comfy.model_base
    import comfy.model_sampling

    if not hasattr(comfy.model_sampling, "ModelSamplingDiscreteFlow"):
        return False
    try:
        import comfy.patcher_extension
    except ImportError:
        return False
    return hasattr(comfy.model_base.ModelType, "FLOW") and hasattr(comfy.patcher_extension, "WrappersMP")


def add_model_folder_type(name: str) -> None:
    """Register models/<name>, keeping what extra_model_paths.yaml may have added before this pack was
    imported.
    """
    import folder_paths

    default = os.path.join(folder_paths.models_dir, name)
    paths = folder_paths.folder_names_and_paths.get(name, ([], set()))[0]
    if default not in paths:
        paths.append(default)
    folder_paths.folder_names_and_paths[name] = (paths, {"folder"})


def model_folders(name: str) -> list[str]:
    """Folders of a model type; none in a process without a ComfyUI, such as a test."""
    host = sys.modules.get("folder_paths")
    return host.get_folder_paths(name) if host else []


def input_folder() -> Path | None:
    """ComfyUI's input folder; None in a process without a ComfyUI, such as a test."""
    host = sys.modules.get("folder_paths")
    return Path(host.get_input_directory()) if host else None


def compute_device() -> torch.device:
    import comfy.model_management

    return comfy.model_management.get_torch_device()


def result_device() -> torch.device:
    """Where ComfyUI wants finished latents and images (the CPU unless --gpu-only)."""
    import comfy.model_management

    return comfy.model_management.intermediate_device()


def offload_device() -> torch.device:
    import comfy.model_management

    return comfy.model_management.unet_offload_device()


def progress_bar(total: int, node_id: str | None) -> Any:
    """A ComfyUI progress bar; hosts before 2025 attach it to the node that runs, newer ones take the id."""
    import comfy.utils

    try:
        return comfy.utils.ProgressBar(total, node_id=node_id)
    except TypeError:
        return comfy.utils.ProgressBar(total)


def preview_size() -> int:
    """Longest side of a preview picture."""
    from comfy.cli_args import args

    return int(getattr(args, "preview_size", 512))


def prompt_server() -> Any | None:
    """ComfyUI's server object, which exists from before packs are imported; None outside of a ComfyUI."""
    server = sys.modules.get("server")
    return getattr(getattr(server, "PromptServer", None), "instance", None)


def _execution_context() -> Any | None:
    try:
        from comfy_execution.utils import get_executing_context
    except ImportError:
        return None
    return get_executing_context()


def running_node_id() -> str | None:
    """The node that ComfyUI executes now, for objects that stock nodes call (a VAE, a MODEL); None if it
    cannot be known.
    """
    context = _execution_context()
    if context is not None:
        return context.node_id
    return getattr(prompt_server(), "last_node_id", None)


def show_text(text: str, node_id: str | None) -> None:
    """Show a line on a node while it runs. Hosts without progress text show nothing."""
    server = prompt_server()
    if node_id is not None and hasattr(server, "send_progress_text"):
        server.send_progress_text(text, node_id)


def running_prompt() -> dict[str, Any] | None:
    """The graph that is executed now: the very object that SaveImage writes into the picture. None where a
    host hides it.
    """
    try:
        from comfy_execution.progress import get_progress_state
    except ImportError:
        return None
    prompt = get_progress_state().dynprompt.get_original_prompt()
    return prompt if isinstance(prompt, dict) else None


def annotate(info: dict[str, Any], node_id: str | None, prompt: dict[str, Any] | None = None) -> bool:
    """Write `info` beside a node of the running graph; SaveImage copies it into the PNG's text chunk
    ``prompt``.

    The place, ``graph[node]["_meta"]["phase_parallel"]``, is read by no host when it executes or caches. Our
    own nodes pass the graph that they get as hidden input; stock samplers that run our MODEL have none, there
    the host is asked. False if there is no graph.
    """
    graph = prompt if prompt is not None else running_prompt()
    if graph is None or node_id is None or node_id not in graph:
        return False
    graph[node_id].setdefault("_meta", {})["phase_parallel"] = info
    return True


def tiled(
    samples: torch.Tensor,
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    tile: tuple[int, int],
    overlap: int,
    scale: float,
    out_channels: int,
) -> torch.Tensor:
    """ComfyUI's own tiling with feathered borders. `tile` is (width, height) in `samples` pixels."""
    import comfy.utils

    return comfy.utils.tiled_scale(
        samples,
        function,
        tile_x=tile[0],
        tile_y=tile[1],
        overlap=overlap,
        upscale_amount=scale,
        out_channels=out_channels,
        output_device=result_device(),
    )


def standing_patcher(unloaded: Callable[[], None]) -> Any:
    """A ModelPatcher without weights, standing for some that live elsewhere; ``unloaded`` runs when ComfyUI unloads it."""
    from comfy.model_patcher import ModelPatcher

    newer = hasattr(ModelPatcher, "detach")

    class StandingPatcher(ModelPatcher):
        def clone(self, *args: Any, **kwargs: Any) -> Any:
            return self

        def detach(self, unpatch_all: bool = True) -> Any:
            model = super().detach(unpatch_all)
            if unpatch_all:  # else it is loaded again in the next moment
                unloaded()
            return model

        def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
            model = super().unpatch_model(device_to, unpatch_weights)
            if unpatch_weights and not newer:
                unloaded()
            return model

    return StandingPatcher(torch.nn.Module(), compute_device(), offload_device(), size=NOMINAL_SIZE)


def load_into_management(patcher: Any) -> None:
    """Put a patcher into ComfyUI's list of loaded models, from which it chooses what to unload."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher])


def release_cached_memory() -> None:
    """Give torch's cached but unused device memory back."""
    import comfy.model_management

    comfy.model_management.soft_empty_cache()
