"""The engine of one loaded checkpoint on one rank: text, pictures, VAE. Every rank of the plan makes the same calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...kernels.kernel_set import choose_kernels
from ...parallel.checkpoint import first_not_finite
from ...parallel.collectives import Communicator
from ...parallel.faults import SharedSymptom
from ...parallel.picture_view import PictureView
from ...parallel.plan import ParallelPlan
from .config import HunyuanImage3Config
from .denoise import CfgMode, Denoiser, DenoiseRow, StepTrace, sample
from .loading import LoadOptions, load_model
from .model import HunyuanImage3Model, ReferenceFeatures, StepInputs
from .prefix import PrefixStore
from .references import EncodedReference, PreparedReference, ReferenceStore, draw_noise, encode_reference
from .resolution import ResolutionTable
from .schedule import flow_sigmas
from .sequence import CondImage, ImageRows, resolution_table
from .step_previews import Report, StepPreviews
from .text_generation import TextGenerator, TextRequest, TextResult
from .text_rules import NotANumberError, StageRules
from .tokenizer import HunyuanTokenizer
from .topology_choice import DenoiseWay
from .vae_memory import VaeRoom, free_bytes

Check = Callable[[int, int], None]
_DEFAULT = LoadOptions()


class NotFiniteError(SharedSymptom):
    """A result holds NaN or infinity; it is never shown as a picture."""


class DamagedWeightsError(RuntimeError):
    """The cause of such a result: weights that were finite when they were loaded are so no more."""


@dataclass(frozen=True)
class ImageRequest:
    """One denoise run. ``seeds``: one per picture of the batch. ``guidance``: CFG scale, or the embedded value of a distilled checkpoint."""

    rows: ImageRows
    steps: int
    guidance: float
    flow_shift: float
    seeds: tuple[int, ...]
    features: tuple[ReferenceFeatures, ...] = ()
    noise: torch.Tensor | None = None
    """``[b, C, h, w]`` when the caller has drawn it already; else it is drawn from ``seeds``."""


class Engine:
    """Owns nothing global: one object per rank and checkpoint. Pure calls over the model, the prefix store and the tokenizer."""

    def __init__(
        self,
        model: HunyuanImage3Model,
        tokenizer: HunyuanTokenizer,
        *,
        options: LoadOptions = _DEFAULT,
        cfg_mode: CfgMode = "batched",
        reuse_text: bool = True,
    ):
        """``options``: those that ``model`` was loaded with."""
        self.model = model
        self.tokenizer = tokenizer
        self.prefixes = PrefixStore(model, reuse_text=reuse_text)
        self.references = ReferenceStore(model)
        self.denoiser = Denoiser(model, self.prefixes, cfg_mode=cfg_mode)
        self.table: ResolutionTable = resolution_table(model.config, tokenizer)
        self.text = TextGenerator(
            model, tokenizer, self.table, self.prefixes, decode=options.decode, reduction=options.reduction, kernels=options.kernels
        )
        _, self.kernels_reason = choose_kernels(model.device, options.kernels)
        self.moe_words = model.weights["decode"].kernels.moe_words

    @classmethod
    def load(
        cls,
        folder: str | Path,
        plan: ParallelPlan,
        comm: Communicator,
        options: LoadOptions,
        *,
        device: torch.device,
        cfg_mode: CfgMode = "batched",
        reuse_text: bool = True,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Engine:
        """Collective. Raises before memory is spent when the folder, the plan or the device does not fit."""
        tokenizer = HunyuanTokenizer.from_folder(folder, HunyuanImage3Config.from_folder(folder))
        model = load_model(folder, plan, comm, options, device=device, progress=progress)
        return cls(model, tokenizer, options=options, cfg_mode=cfg_mode, reuse_text=reuse_text)

    @property
    def config(self) -> HunyuanImage3Config:
        return self.model.config

    def connect(self, comm: Communicator) -> None:
        """Go on with the communicator of a new generation after a fault; weights stay, everything computed with peers is dropped."""
        self.model.comm = comm
        self.model.denoise_as(comm.plan)
        self.denoiser.release()
        self.prefixes.clear()

    def denoise_as(self, way: DenoiseWay) -> None:
        """Steps from now on go that way, over the same weights and groups; prefixes of another topology stay, and are that topology's. All ranks
        call it alike."""
        plan = self.model.plan.denoising(way.denoise, way.attention)
        if (plan, way.cfg) != (self.model.plan, self.denoiser.cfg_mode):
            self.denoiser.release()  # recorded steps would go the old way
            self.model.denoise_as(plan)
            self.denoiser.cfg_mode = way.cfg
        self.model.comm.ledger.note("denoise", f"{plan.describe_denoise()} {way.cfg}")

    def encode_references(self, prepared: Sequence[PreparedReference], noises: Sequence[torch.Tensor]) -> list[EncodedReference]:
        return [encode_reference(self.model, picture, noise) for picture, noise in zip(prepared, noises, strict=True)]

    def generate_text(
        self,
        request: TextRequest,
        *,
        features: Sequence[ReferenceFeatures] = (),
        cond_images: Sequence[CondImage] = (),
        check: Check = lambda done, total: None,
        report: Report = lambda event: None,
        trace: Callable[[torch.Tensor], None] | None = None,
        rules: StageRules | None = None,
    ) -> TextResult:
        try:
            return self.text.generate(
                request, features=features, cond_images=cond_images, check=check, report=report, trace=trace, rules=rules
            )
        except NotANumberError:
            self._refuse_damaged_weights()
            raise

    def velocity(self, rows: Sequence[DenoiseRow], latents: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """``latents [b, C, h, w]`` -> ``[n, C, h, w]`` fp32; one step of somebody else's sampler."""
        out = self.denoiser.velocity(rows, latents.to(self.model.device, torch.float32), step)
        self._await_steps("a step of the picture")
        return self._finite(out, f"the velocity at timestep {step.timestep:g}")

    def sample(
        self,
        request: ImageRequest,
        *,
        check: Check = lambda done, total: None,
        trace: Callable[[int, StepTrace], None] | None = None,
    ) -> torch.Tensor:
        """The official Euler loop; final latent ``[b, C, h, w]``, still multiplied by the VAE's scaling factor."""
        noise = request.noise if request.noise is not None else self.draw(request)
        latent = sample(
            self.denoiser,
            request.rows.cond,
            request.rows.uncond,
            noise.to(self.model.device),
            flow_sigmas(request.steps, request.flow_shift),
            guidance=request.guidance,
            features=request.features,
            distilled=self.config.cfg_distilled,
            check=check,
            trace=trace,
        )
        self._await_steps("the last step of the picture")
        return self._finite(latent, "the final latent")

    def previews(self, request: ImageRequest, report: Report) -> Callable[[int, StepTrace], None]:
        """A ``trace`` of :meth:`sample` that reports every step."""

        def settle(reached: torch.cuda.Event | None) -> None:
            if reached is not None and self.model.plan.world_size > 1:
                self.model.comm.await_event(reached, "a step of the picture")
            elif reached is not None:
                reached.synchronize()  # a rank alone may take its time
            self.denoiser.require()

        return StepPreviews(flow_sigmas(request.steps, request.flow_shift), report, settle)

    def draw(self, request: ImageRequest) -> torch.Tensor:
        """Initial noise ``[b, C, h, w]``, one generator per picture."""
        factor = self.config.vae.ffactor_spatial
        shape = (1, self.config.vae.latent_channels, request.rows.height // factor, request.rows.width // factor)
        references = [(1, *feature.latent.shape) for feature in request.features]
        return torch.cat([draw_noise(seed, references, shape)[1] for seed in request.seeds])

    @torch.inference_mode()
    def vae_decode(self, latents: torch.Tensor, *, check: Check = lambda done, total: None) -> torch.Tensor:
        """Unscaled latents ``[b, C, h, w]`` -> pixels ``[b, 3, H, W]`` fp32, nominally [-1, 1], not clamped. ``check`` runs before each block."""
        pixels = self.model.around.vae.decode(latents.to(self.model.device, torch.float32), check, PictureView(self.model.comm))
        return self._finite(pixels, "the decoded picture")

    @torch.inference_mode()
    def vae_encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels ``[b, 3, H, W]`` in [-1, 1] -> posterior ``mean, logvar [b, C, h, w]``, unscaled."""
        return self.model.around.vae.encode(pixels.to(self.model.device, torch.float32), PictureView(self.model.comm))

    def vae_room(self, height: int, width: int) -> VaeRoom:
        """Collective. Whether the VAE can take ``height`` x ``width`` latent pixels at once, by the memory of the fullest rank.

        Recorded steps are kept beside the VAE, since the next picture replays them; only where it would not fit they give way.
        """
        room = self._room_now(height, width)
        if room.fits:
            return room
        self.denoiser.release()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._room_now(height, width)

    def _room_now(self, height: int, width: int) -> VaeRoom:
        comm, vae = self.model.comm, self.config.vae
        mine = free_bytes(self.model.device)
        free = [row[0] for row in comm.control_gather([-1 if mine is None else mine])]
        return VaeRoom.of(vae, height=height, width=width, ranks=comm.plan.world_size, free=None if -1 in free else min(free))

    def _await_steps(self, what: str) -> None:
        """Before anybody sees what they have computed."""
        self.model.comm.await_device(what)
        self.denoiser.require()

    def _finite(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        if not bool(torch.isfinite(tensor).all()):
            self._refuse_damaged_weights()
            raise NotFiniteError(
                f"{what} holds NaN or infinity, so no picture is made from it; try weight dtype bf16 or fp32, or check the model files"
            )
        return tensor

    def _refuse_damaged_weights(self) -> None:
        name = first_not_finite(self.model.resident)
        if name is not None:
            raise DamagedWeightsError(
                f"weights of {name} in this rank's memory have become NaN or infinity; the next prompt loads the model again, "
                "and if this comes back the device's memory is faulty"
            )

    def unscale(self, latent: torch.Tensor) -> torch.Tensor:
        """Diffusion latent to VAE latent (spec 4.7)."""
        vae = self.config.vae
        return latent / vae.scaling_factor + (vae.shift_factor or 0.0)
