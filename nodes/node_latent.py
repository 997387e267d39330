"""Resolution and Empty Latent: sizes before and after the prompt is encoded."""

from __future__ import annotations

from typing import Any

import torch

from . import host_compat, inputs, size_choices

RELEASE_CHANNELS = 32


def empty_latent(height: int, width: int, batch_size: int, channels: int) -> dict[str, Any]:
    """LATENT of zeros [batch, channels, height / 16, width / 16]; newer hosts read the stride from it."""
    stride = host_compat.LATENT_STRIDE
    samples = torch.zeros(batch_size, channels, height // stride, width // stride)
    return {"samples": samples, "downscale_ratio_spacial": stride}


class HunyuanImage3Resolution:
    DESCRIPTION = (
        "One of the sizes the model was trained on, or the one nearest to the proportions of an image."
    )
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("INT", "INT")
    RETURN_NAMES = ("width", "height")
    OUTPUT_TOOLTIPS = ("Width in pixels.", "Height in pixels.")
    FUNCTION = "choose"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "size": (
                    list(size_choices.bucket_labels()),
                    {
                        "default": size_choices.square_label(),
                        "tooltip": "Width x height. Ignored when an image is connected. 1280x720, "
                        "720x1280, 1024x768 and 768x1024 exist in Instruct checkpoints only; others draw "
                        "the nearest proportions.",
                    },
                )
            },
            "optional": {
                "image": (
                    "IMAGE",
                    {"tooltip": "Follow this picture's proportions instead of the size above."},
                ),
            },
        }

    def choose(self, size: str, image: Any = None) -> tuple[int, int]:
        height, width = (
            size_choices.parse_label(size)
            if image is None
            else size_choices.nearest(*size_choices.image_size(image))
        )
        return width, height


class EmptyHunyuanImage3Latent:
    DESCRIPTION = (
        "An empty latent for HunyuanImage-3.0 (32 channels, one pixel per 16). HunyuanImage-3.0 Encode "
        "gives one of the right size already; "
        "use this one to change the batch size or in graphs without it."
    )
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("LATENT",)
    OUTPUT_TOOLTIPS = ("For the sampler's latent input. Its size must be the one that was encoded.",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "width": inputs.width(),
                "height": inputs.height(),
                "batch_size": inputs.batch_size(),
            },
        }

    def make(self, width: int, height: int, batch_size: int) -> tuple[dict[str, Any]]:
        return (empty_latent(height, width, batch_size, RELEASE_CHANNELS),)
