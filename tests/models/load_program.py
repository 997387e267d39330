"""One rank that loads a checkpoint and prints, as JSON, what memory that took. Started by test_loading.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from phase_parallel.models.hunyuan_image_3.loading import LoadOptions, load_model
from phase_parallel.parallel.collectives import Communicator
from phase_parallel.parallel.groups import ProcessGroups
from phase_parallel.parallel.plan import make_plan


class EveryRankLikeThis(Communicator):
    """The comparison of replicas, without the replicas."""

    def control_gather(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values)] * self.plan.world_size


def memory(name: str) -> int:
    """VmRSS (now) or VmHWM (peak since the last reset) of this process in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def main(folder: str, plan: dict, weight_dtype: str) -> dict[str, int]:
    own = make_plan(**plan)
    comm = EveryRankLikeThis(own, ProcessGroups(own, {}, None, "gloo"))
    # Touch what torch sets up at first use, so that it does not count as the load's.
    torch.nn.functional.linear(torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)).sum()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    model = load_model(folder, own, comm, LoadOptions(weight_dtype), device=torch.device("cpu"))
    peak, after = memory("VmHWM"), memory("VmRSS")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(model)}
    return {"before": before, "peak": peak, "after": after, "resident": sum(storages.values())}


def tensors(model: object) -> list[torch.Tensor]:
    found = list(model.around.parameters())
    weights = model.weights["denoise"]
    found += [weights.wte.tensor, weights.lm_head.tensor, weights.ln_f]
    for layer in weights.layers:
        found += [layer.input_layernorm, layer.query_layernorm, layer.key_layernorm, layer.post_attention_layernorm, layer.router]
        found += [w.tensor for w in (layer.qkv_proj, layer.o_proj, layer.shared_gate_and_up, layer.shared_down)]
        found += [tensor for block in layer.experts for tensor in (block.w1, block.w2)]
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])))
