"""The ``modules`` cases of a golden folder: single modules on given inputs. Groups that the file does not have are not run."""

from __future__ import annotations

import torch

from ..models.hunyuan_image_3.engine import Engine
from ..models.hunyuan_image_3.reference_images import vit_patches
from ..models.hunyuan_image_3.token_row import TokenRow
from ..models.hunyuan_image_3.transformer import embed

Tensors = dict[str, torch.Tensor]


@torch.inference_mode()
def run_modules(given: Tensors, engine: Engine) -> Tensors:
    """Inputs are returned as they are, so that the comparison covers the whole file."""
    got: Tensors = {}
    for prefix, group in (("text.", _text), ("time.", _time), ("patch_embed.", _patch_embed), ("final_layer.", _final_layer), ("vae.", _vae), ("vit.", _vit)):
        if any(name.startswith(prefix) for name in given):
            got |= group(given, engine)
    return got


def _text(given: Tensors, engine: Engine) -> Tensors:
    model, tokens = engine.model, given["text.tokens"]
    row = TokenRow(tuple(tokens.tolist()), (), None)
    probe: dict[str, list] = {"hidden": [], "router_logits": [], "router_ids": [], "router_weights": []}
    cache = model.new_cache(len(row), "prefill")
    hidden = model.prefill(row, 0, len(row), cache, probe=probe)
    got = {
        "text.tokens": tokens,
        "text.embeddings": embed(tokens.to(model.device), model.weights["prefill"], model.comm.phase("prefill")),
        "text.logits": model.next_logits(hidden, "prefill"),
    }
    names = {"hidden": "hidden", "router_logits": "router_logits", "router_ids": "router_topk_ids", "router_weights": "router_topk_weights"}
    for source, target in names.items():
        got |= {f"text.layer{layer}.{target}": value for layer, value in enumerate(probe[source])}
    return got


def _time(given: Tensors, engine: Engine) -> Tensors:
    around, t = engine.model.around, given["time.t"]
    got = {"time.t": t}
    for name in ("timestep_emb", "time_embed", "time_embed_2", "guidance_emb", "timestep_r_emb"):
        module = getattr(around, name)
        if module is not None:
            got[f"time.{name}"] = module(t.to(engine.model.device))
    return got


def _patch_embed(given: Tensors, engine: Engine) -> Tensors:
    around, device = engine.model.around, engine.model.device
    latent, t = given["patch_embed.latent"], given["patch_embed.t"]
    out = around.patch_embed(latent.to(device), around.time_embed(t.to(device)))
    return {"patch_embed.latent": latent, "patch_embed.t": t, "patch_embed.out": out}


def _final_layer(given: Tensors, engine: Engine) -> Tensors:
    around, device = engine.model.around, engine.model.device
    hidden, t, out = given["final_layer.hidden"], given["final_layer.t"], given["final_layer.out"]
    h, w = out.shape[-2:]
    result = around.final_layer(hidden.to(device), around.time_embed_2(t.to(device)), h, w)
    return {"final_layer.hidden": hidden, "final_layer.t": t, "final_layer.out": result}


def _vae(given: Tensors, engine: Engine) -> Tensors:
    got = {}
    if "vae.encode.pixels" in given:
        pixels = given["vae.encode.pixels"]
        mean, logvar = engine.vae_encode(pixels.reshape(-1, *pixels.shape[-3:]))
        got |= {"vae.encode.pixels": pixels}
        got |= {name: value.reshape(given[name].shape) for name, value in (("vae.encode.mean", mean), ("vae.encode.logvar", logvar))}
    if "vae.decode.latent" in given:
        latent = given["vae.decode.latent"]
        image = engine.vae_decode(latent.squeeze(2))
        got |= {"vae.decode.latent": latent, "vae.decode.image": image.reshape(given["vae.decode.image"].shape)}
    return got


def _vit(given: Tensors, engine: Engine) -> Tensors:
    """The real resize may round by one level, so what follows it is fed with the given patches."""
    model, image = engine.model, given["vit.image_u8"]
    patches, mask, grid = vit_patches(image, model.config.vit)
    rows, columns = (int(n) for n in given["vit.grid"])
    hidden = model.around.vision_model(
        given["vit.patches"].unsqueeze(0).to(model.device, model.dtype), given["vit.mask"].bool().unsqueeze(0).to(model.device), [(rows, columns)]
    )
    return {
        "vit.image_u8": image,
        "vit.patches": patches.reshape(given["vit.patches"].shape),
        "vit.mask": mask,
        "vit.grid": torch.tensor(grid),
        "vit.last_hidden": hidden.reshape(given["vit.last_hidden"].shape),
        "vit.aligned": model.around.vision_aligner(hidden).reshape(given["vit.aligned"].shape),
    }
