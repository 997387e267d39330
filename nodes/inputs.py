"""Widgets that several nodes share, each with its tooltip: one question has one wording everywhere."""

from __future__ import annotations

from typing import Any

from . import prompt_files, size_choices
from .prompts import CHECKPOINT_DEFAULT, SYSTEM_PROMPT_CHOICES

Widget = tuple[Any, dict[str, Any]]

CATEGORY = "HunyuanImage3"

TASKS = ("off", "auto ratio", "think + recaption", "recaption", "think")

IMAGE_NAMES = ("image1", "image2", "image3")


def model() -> Widget:
    return ("MODEL", {"tooltip": "The MODEL output of Load HunyuanImage-3.0."})


def clip() -> Widget:
    return (
        "CLIP",
        {"tooltip": "The CLIP output of Load HunyuanImage-3.0. Text encoders of other models do not fit."},
    )


def vae() -> Widget:
    return (
        "VAE",
        {"tooltip": "The VAE output of Load HunyuanImage-3.0. Autoencoders of other models do not fit."},
    )


def prompt() -> Widget:
    return (
        "STRING",
        {
            "multiline": True,
            "default": "",
            "tooltip": "What the picture should show. There is no negative prompt in this model. Control "
            "tokens such as <img> are refused.",
        },
    )


def question() -> Widget:
    return (
        "STRING",
        {
            "multiline": True,
            "default": "",
            "tooltip": "What you want to know, about the connected images in their order or about anything. Control tokens such as "
            "<img> are refused.",
        },
    )


def system_prompt() -> Widget:
    return (
        [*SYSTEM_PROMPT_CHOICES, *prompt_files.file_choices()],
        {
            "default": CHECKPOINT_DEFAULT,
            "tooltip": "Instruction before the prompt. 'checkpoint default' follows the checkpoint's "
            "generation_config.json; the en_ texts "
            "and 'dynamic' are read from the checkpoint folder's system_prompt.py; 'custom' uses the box "
            "below; 'file: …' is a .txt or .md file in ComfyUI's input folder.",
        },
    )


def custom_system_prompt() -> Widget:
    return (
        "STRING",
        {
            "multiline": True,
            "default": "",
            "tooltip": "The system prompt itself; used only when system_prompt is 'custom' or 'dynamic'.",
        },
    )


def task(default: str) -> Widget:
    return (
        list(TASKS),
        {
            "default": default,
            "tooltip": "What the model writes before it draws. 'off': nothing. 'auto ratio': only the "
            "picture's proportions. "
            "'think + recaption', 'recaption', 'think': text that guides the picture (Instruct checkpoints "
            "only).",
        },
    )


def size() -> Widget:
    choices = [
        size_choices.AUTO,
        size_choices.FOLLOW_IMAGE,
        size_choices.WIDTH_HEIGHT,
        *size_choices.bucket_labels(),
    ]
    return (
        choices,
        {
            "default": size_choices.AUTO,
            "tooltip": "'auto': the model chooses the proportions while it writes (with task 'off', width "
            "and height below are used). "
            "'follow image 1': those of the first image. 'width x height': the two numbers below. Or one of "
            "the model's own sizes. "
            "Always the nearest proportions of the checkpoint's table are drawn.",
        },
    )


def width() -> Widget:
    return pixels("Width of the picture; the nearest proportions of the model's size table are drawn.")


def height() -> Widget:
    return pixels("Height of the picture; the nearest proportions of the model's size table are drawn.")


def pixels(tooltip: str) -> Widget:
    return ("INT", {"default": 1024, "min": 16, "max": 8192, "step": 16, "tooltip": tooltip})


def batch_size() -> Widget:
    return (
        "INT",
        {"default": 1, "min": 1, "max": 64, "tooltip": "How many pictures are drawn from the same prompt."},
    )


def reference_seed() -> Widget:
    return (
        "INT",
        {
            "default": 0,
            "min": 0,
            "max": 0xFFFFFFFFFFFFFFFF,
            "advanced": True,
            "tooltip": "Seed of the noise with which reference pictures are encoded. Keep it equal in Think / Recaption and Encode: "
            "the ranks then encode each picture once and reuse what they have read.",
        },
    )


def seed(tooltip: str) -> Widget:
    return (
        "INT",
        {
            "default": 0,
            "min": 0,
            "max": 0xFFFFFFFFFFFFFFFF,
            "control_after_generate": True,
            "tooltip": tooltip,
        },
    )


def sampling() -> dict[str, Widget]:
    """How tokens are drawn while the model writes. 0 means the checkpoint's own value where noted."""
    return {
        "max_new_tokens": (
            "INT",
            {
                "default": 2048,
                "min": 1,
                "max": 32768,
                "advanced": True,
                "tooltip": "The model stops writing after this many tokens.",
            },
        ),
        "do_sample": (
            [CHECKPOINT_DEFAULT, "sample", "greedy"],
            {
                "default": CHECKPOINT_DEFAULT,
                "advanced": True,
                "tooltip": "'sample' draws tokens with the seed, 'greedy' always takes the likeliest one.",
            },
        ),
        "temperature": (
            "FLOAT",
            {
                "default": 0.0,
                "min": 0.0,
                "max": 5.0,
                "step": 0.01,
                "advanced": True,
                "tooltip": "Higher is more varied text. 0: the checkpoint's own value.",
            },
        ),
        **_truncation(),
    }


def _truncation() -> dict[str, Widget]:
    """Which tokens may be drawn at all."""
    return {
        "top_k": (
            "INT",
            {
                "default": 0,
                "min": 0,
                "max": 200000,
                "advanced": True,
                "tooltip": "Draw from this many likeliest tokens. 0: the checkpoint's own value.",
            },
        ),
        "top_p": (
            "FLOAT",
            {
                "default": 0.0,
                "min": 0.0,
                "max": 1.0,
                "step": 0.01,
                "advanced": True,
                "tooltip": "Draw from the likeliest tokens that together have this probability. 0: the "
                "checkpoint's own value.",
            },
        ),
        "repetition_penalty": (
            "FLOAT",
            {
                "default": 0.0,
                "min": 0.0,
                "max": 2.0,
                "step": 0.01,
                "advanced": True,
                "tooltip": "Above 1 makes repeated tokens less likely. 0: the checkpoint's own value.",
            },
        ),
    }


def cot_text() -> Widget:
    return (
        "STRING",
        {
            "forceInput": True,
            "tooltip": "Text of the model's own turn, with its <think> and <recaption> tags, usually from "
            "Think / Recaption. "
            "Edit it on the way to steer the picture.",
        },
    )


def images() -> dict[str, Widget]:
    """A fixed number, since growing input lists differ between ComfyUI versions."""
    return {
        name: (
            "IMAGE",
            {
                "tooltip": f"Reference picture {number}, called 'image {number}' in the prompt (Instruct "
                "checkpoints only)."
            },
        )
        for number, name in enumerate(IMAGE_NAMES, start=1)
    }
