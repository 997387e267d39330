"""What a graph should give, without ComfyUI and without other ranks: the same rows, one rank, a plain Euler
loop.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from phase_parallel.models.hunyuan_image_3.denoise import guide
from phase_parallel.models.hunyuan_image_3.schedule import euler_step, flow_sigmas
from phase_parallel.nodes.driver import Driver
from phase_parallel.nodes.engine_handle import EngineChoice, EngineHandle
from phase_parallel.nodes.image_rows import picture_rows
from phase_parallel.parallel.cluster import Cluster
from phase_parallel.parallel.plan import make_plan


class NoHost:
    """Nobody cancels and no prompt runs."""

    interruption = KeyboardInterrupt

    def running_prompt(self) -> str | None:
        return None

    def cancelled(self) -> bool:
        return False

    def clear_cancel(self) -> None: ...


class Reference:
    def __init__(self, checkpoint: Path) -> None:
        driver = Driver(Cluster.alone(torch.device("cpu")), NoHost(), None)
        plan = make_plan("single", world_size=1)
        self.engine = EngineHandle(
            EngineChoice(str(checkpoint), plan, "auto", "micro_major", "multi_micro"), driver
        )

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
    ) -> np.ndarray:
        """Float picture [H, W, 3] in 0..255, as KSampler (or, from step `start` with `pixels` [H, W, 3],
        KSamplerAdvanced) draws it.

        size: (height, width).
        """
        height, width = size
        rows = picture_rows(
            self.engine, prompt=prompt, system_prompt=None, cot_text="", height=height, width=width
        )
        assert (rows.height, rows.width) == size
        vae = self.engine.config.vae
        shape = (1, vae.latent_channels, height // 16, width // 16)
        # What ComfyUI's own noise is: fp32, from torch's generator on the CPU.
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        sigmas = flow_sigmas(steps, 3.0)[start:]
        clean = torch.zeros(shape) if pixels is None else self._encode(pixels) * vae.scaling_factor
        latent = sigmas[0] * noise + (1 - sigmas[0]) * clean
        sent = [
            {"kind": "cond", "row": rows.cond.to_json()},
            {"kind": "uncond", "row": rows.uncond.to_json()},
        ]
        for sigma, after in zip(sigmas.tolist(), sigmas[1:].tolist(), strict=False):
            args = {"rows": sent, "sigma": sigma, "sigma_next": after, "guidance": None}
            velocity = self._call("denoise", args, {"latents": torch.cat([latent, latent])}, "velocity")
            latent = euler_step(latent, guide(velocity[:1], velocity[1:], cfg), sigma, after)
        decoded = self._call("vae_decode", {}, {"latents": latent / vae.scaling_factor}, "pixels")
        return ((decoded[0] * 0.5 + 0.5).clamp(0, 1) * 255).movedim(0, -1).numpy()

    def _encode(self, pixels: np.ndarray) -> torch.Tensor:
        image = torch.from_numpy(pixels).float().movedim(-1, 0)[None] / 255
        return self._call("vae_encode", {}, {"pixels": image * 2 - 1}, "latents")

    def _call(self, op: str, args: dict, tensors: dict, result: str) -> torch.Tensor:
        _, answer = self.engine.call(op, args, tensors, node_id="reference")
        return answer[result]
