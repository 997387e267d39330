"""The MODEL socket: a real model for the stock samplers, or, in a host that cannot sample flow models, an
object that says so.
"""

from __future__ import annotations

from typing import Any, NoReturn

from . import host_compat
from .engine_handle import EngineHandle

NO_FLOW = (
    "This ComfyUI is too old to sample flow-matching models (it needs 0.3.64 or newer); use the "
    "HunyuanImage-3.0 Generate node, "
    "which runs in it, or update ComfyUI."
)


class NoFlowModel:
    """MODEL for hosts without flow sampling: it carries the engine to Generate, and every attempt to sample
    raises one sentence.
    """

    def __init__(self, engine: EngineHandle) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> NoReturn:
        # Python and ComfyUI's own bookkeeping probe dunder names; those must stay absent as on any object.
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(NO_FLOW)


def build_model(engine: EngineHandle) -> Any:
    """What goes into the MODEL socket of this host."""
    if not host_compat.has_flow_sampling():
        return NoFlowModel(engine)
    from .flow_model import build_flow_model

    return build_flow_model(engine)


def engine_of_model(model: object) -> EngineHandle:
    """The engine behind a MODEL input. Raises ValueError for another model."""
    inner = model if isinstance(model, NoFlowModel) else getattr(model, "model", None)
    engine = getattr(inner, "engine", None)
    if not isinstance(engine, EngineHandle):
        raise ValueError(
            "The model input is not from Load HunyuanImage-3.0; connect that node's MODEL output (other "
            "models do not fit)."
        )
    return engine
