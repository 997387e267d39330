"""What a graph should give, without ComfyUI and without other ranks: the same rows, one rank, a plain Euler
loop.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from lone_engine import Events, QuietHost

from phase_parallel.models.hunyuan_image_3.denoise import guide
from phase_parallel.models.hunyuan_image_3.schedule import euler_step, flow_sigmas
from phase_parallel.nodes.driver import Driver
from phase_parallel.nodes.engine_handle import EngineChoice, EngineHandle
from phase_parallel.nodes.image_rows import picture_rows
from phase_parallel.nodes.node_generate import DrawSettings, draw
from phase_parallel.nodes.references import References, prepare_references
from phase_parallel.nodes.text_stage import Sampling, TextWish, run_text_stage
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.plan import make_plan


class Reference:
    def __init__(self, checkpoint: Path) -> None:
        driver = Driver(Cluster.alone(torch.device("cpu")), QuietHost(), None)
        plan = make_plan("single", world_size=1)
        self.engine = EngineHandle(
            EngineChoice(str(checkpoint), plan, "auto", "micro_major", "multi_micro"), driver
        )

    def references(self, images: list[np.ndarray], seed: int) -> References:
        """images: [H, W, 3] uint8, as LoadImage reads them."""
        prepared = prepare_references(self.engine, [_image(pixels) for pixels in images], seed=seed)
        prepared.encode(node_id="reference")
        return prepared

    def picture(
        self,
        prompt: str,
        size: tuple[int, int],
        *,
        seed: int,
        steps: int,
        cfg: float,
        start: int = 0,
        pixels: np.ndarray | None = None,
        system_prompt: str | None = None,
        cot_text: str = "",
        references: References | None = None,
    ) -> np.ndarray:
        """Float picture [H, W, 3] in 0..255, as KSampler (or, from step `start` with `pixels` [H, W, 3],
        KSamplerAdvanced) draws it.

        size: (height, width). cfg: guidance scale, or the embedded guidance of a distilled checkpoint.
        """
        height, width = size
        rows = picture_rows(
            self.engine, prompt=prompt, system_prompt=system_prompt, cot_text=cot_text, height=height, width=width, references=references
        )
        assert (rows.height, rows.width) == size
        vae = self.engine.config.vae
        shape = (1, vae.latent_channels, height // 16, width // 16)
        # What ComfyUI's own noise is: fp32, from torch's generator on the CPU.
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        sigmas = flow_sigmas(steps, 3.0)[start:]
        clean = torch.zeros(shape) if pixels is None else self._encode(pixels) * vae.scaling_factor
        latent = sigmas[0] * noise + (1 - sigmas[0]) * clean
        keys = [] if references is None else list(references.keys)
        branches = {"cond": rows.cond, "uncond": rows.uncond}
        sent = [{"kind": kind, "row": row.to_json(), "references": keys, "latent": 0} for kind, row in branches.items() if row is not None]
        for sigma, after in zip(sigmas.tolist(), sigmas[1:].tolist(), strict=False):
            args = {"rows": sent, "sigma": sigma, "sigma_next": after, "guidance": cfg if rows.uncond is None else None}
            velocity = self._call("denoise", args, {"latents": latent}, "velocity")
            if rows.uncond is not None:
                velocity = guide(velocity[:1], velocity[1:], cfg)
            latent = euler_step(latent, velocity, sigma, after)
        return self._decode(latent / vae.scaling_factor)

    def generated(
        self, prompt: str, images: list[np.ndarray], *, seed: int, steps: int
    ) -> tuple[str, tuple[int, int], np.ndarray]:
        """Text, size and picture as Generate makes them: think and recaption, greedily, automatic size, no system prompt."""
        wish = TextWish(
            prompt, "think + recaption", "None", "", "auto", 1024, 1024, 64, seed, Sampling("greedy"),
            images=tuple(_image(pixels) for pixels in images), reference_seed=seed,
        )  # fmt: skip
        outcome = run_text_stage(self.engine, wish, node_id="reference", report=None)
        settings = DrawSettings.resolve(self.engine, steps=steps, guidance=0.0, flow_shift=0.0, seed=seed, batch_size=1)
        latent = draw(self.engine, prompt, None, outcome, self.references(images, seed), settings, Events())
        return outcome.cot_text, (outcome.height, outcome.width), self._decode(latent)

    def answer(self, question: str, images: list[np.ndarray], *, max_new_tokens: int) -> str:
        """What the model greedily says, without a system prompt; reference seed 0."""
        args = {
            "prompt": question, "system_prompt": None, "cot_text": None, "task": "auto", "image_size": None,
            "max_new_tokens": max_new_tokens, "references": list(self.references(images, 0).keys),
        }  # fmt: skip
        result, _ = self.engine.call("generate_text", args, {}, node_id="reference")
        return result["answer"]

    def _decode(self, latents: torch.Tensor) -> np.ndarray:
        decoded = self._call("vae_decode", {}, {"latents": latents}, "pixels")
        return ((decoded[0] * 0.5 + 0.5).clamp(0, 1) * 255).movedim(0, -1).numpy()

    def _encode(self, pixels: np.ndarray) -> torch.Tensor:
        image = torch.from_numpy(pixels).float().movedim(-1, 0)[None] / 255
        return self._call("vae_encode", {}, {"pixels": image * 2 - 1}, "latents")

    def _call(self, op: str, args: dict, tensors: dict, result: str) -> torch.Tensor:
        _, answer = self.engine.call(op, args, tensors, node_id="reference")
        return answer[result]


def _image(pixels: np.ndarray) -> torch.Tensor:
    """[H, W, 3] uint8 -> IMAGE [1, H, W, 3]."""
    return torch.from_numpy(pixels).float()[None] / 255
