"""The losses of a training as one PNG. Imports matplotlib, which only this needs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from .errors import MiniError
from .loop import read_log

HIDDEN = ("stage", "step", "seconds")


def require_matplotlib() -> None:
    """Before a long training, at whose end there would be nothing to draw with. Raises MiniError."""
    if find_spec("matplotlib") is None:
        raise MiniError("The loss curves are drawn with matplotlib, which is not installed; run `python -m pip install matplotlib` and the same command again.")


def plot_losses(log: Path, out: Path) -> None:
    """One panel for each stage of a LossLog, in the order of training; every value on a logarithmic scale. Raises MiniError without matplotlib."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_log(log)
    stages = list(dict.fromkeys(line["stage"] for line in lines))
    figure = Figure(figsize=(4.2 * len(stages), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for stage, panel in zip(stages, _flat(figure.subplots(1, len(stages))), strict=True):
        mine = [line for line in lines if line["stage"] == stage]
        for name in [key for key in mine[0] if key not in HIDDEN]:
            panel.plot([line["step"] for line in mine], [line[name] for line in mine], label=name, linewidth=1)
        panel.set_yscale("log")
        panel.set_title(f"{stage}: {mine[-1]['step']} steps, {mine[-1]['seconds'] - mine[0]['seconds']:.0f} s", fontsize=10)
        panel.set_xlabel("step")
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=100)


def _flat(panels: object) -> Sequence:
    return list(panels.flat) if hasattr(panels, "flat") else [panels]
