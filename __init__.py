"""ComfyUI-PhaseParallel: several ComfyUI processes, one GPU each, make one image together.

This file is what ComfyUI imports. The command line and the tests import the same folder as the package
`phase_parallel`; there no ComfyUI is around, and nothing is registered.
"""

import sys

WEB_DIRECTORY = "./web"

NODE_CLASS_MAPPINGS: dict[str, type] = {}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}

if "folder_paths" in sys.modules and "nodes" in sys.modules:
    from .nodes import registry

    NODE_CLASS_MAPPINGS.update(registry.node_classes())
    NODE_DISPLAY_NAME_MAPPINGS.update(registry.display_names())
    registry.register_with_host()

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
