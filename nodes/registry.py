"""The one table of nodes, and what a ComfyUI that imports the pack gets from it."""

from __future__ import annotations

import os

from ..parallel.environment import LaunchEnvironment
from . import checkpoint_folders, guard, host_compat
from .follower import follower_nodes
from .node_ask import HunyuanImage3Ask
from .node_encode import HunyuanImage3Encode
from .node_generate import HunyuanImage3Generate
from .node_guidance import HunyuanImage3Guidance
from .node_latent import EmptyHunyuanImage3Latent, HunyuanImage3Resolution
from .node_loader import HunyuanImage3Loader
from .node_noise import HunyuanImage3ReferenceNoise
from .node_ranks import HunyuanImage3Ranks
from .node_rewrite import HunyuanImage3Rewrite

# Ids are stored in users' graphs and are never renamed; display names may change.
NODES: dict[str, tuple[type, str]] = {
    "HunyuanImage3Loader": (HunyuanImage3Loader, "Load HunyuanImage-3.0"),
    "HunyuanImage3Generate": (HunyuanImage3Generate, "HunyuanImage-3.0 Generate"),
    "HunyuanImage3Rewrite": (HunyuanImage3Rewrite, "HunyuanImage-3.0 Think / Recaption"),
    "HunyuanImage3Ask": (HunyuanImage3Ask, "HunyuanImage-3.0 Ask"),
    "HunyuanImage3Encode": (HunyuanImage3Encode, "HunyuanImage-3.0 Encode"),
    "HunyuanImage3Resolution": (HunyuanImage3Resolution, "HunyuanImage-3.0 Resolution"),
    "EmptyHunyuanImage3Latent": (EmptyHunyuanImage3Latent, "Empty HunyuanImage-3.0 Latent"),
    "HunyuanImage3Guidance": (HunyuanImage3Guidance, "HunyuanImage-3.0 Guidance"),
    "HunyuanImage3ReferenceNoise": (HunyuanImage3ReferenceNoise, "HunyuanImage-3.0 Reference Noise"),
    "HunyuanImage3Ranks": (HunyuanImage3Ranks, "HunyuanImage-3.0 Ranks"),
}


def node_classes() -> dict[str, type]:
    """For NODE_CLASS_MAPPINGS; ranks that follow another get the follower too."""
    return {name: node for name, (node, _) in NODES.items()} | follower_nodes()


def display_names() -> dict[str, str]:
    return {name: title for name, (_, title) in NODES.items()}


def register_with_host() -> None:
    """The folder type and the routes; called once, while ComfyUI imports the pack and its server has not
    started yet.
    """
    host_compat.add_model_folder_type(checkpoint_folders.FOLDER_TYPE)
    server = host_compat.prompt_server()
    if server is not None:
        guard.install(server, LaunchEnvironment.from_environ(os.environ))
