"""What ``phase-parallel bench article`` is made of: each part is a few calls of the other benches, sized to take less than eight minutes on four H200s.

One call gives one file. Calls that need four ranks are named on two as well, so that the page says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BenchError


@dataclass(frozen=True)
class Setting:
    """Of all parts. ``gib`` and ``folder``: how large the checkpoint of part load may be, and where it lies."""

    ranks: int
    device: str
    small: bool
    gib: float | None = None
    folder: Path | None = None

    def words(self) -> str:
        return f"{self.ranks} ranks on {self.device}{', toy sizes' if self.small else ''}"


@dataclass(frozen=True)
class Call:
    """``words`` of ``phase-parallel bench`` that give the file ``name``.json; none for what is only written down. ``needs``: so many ranks at least."""

    part: str
    name: str
    title: str
    words: tuple[str, ...]
    needs: int = 2
    repeats: int = 1


def _common(setting: Setting, ranks: int | None = None) -> tuple[str, ...]:
    return ("--ranks", str(ranks or setting.ranks), "--device", setting.device, "--scale", "small" if setting.small else "full")


def _schemes(*names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--scheme", name))


def _repeated(setting: Setting, full: int) -> tuple[tuple[str, str], int]:
    repeats = 1 if setting.small else full
    return ("--repeats", str(repeats)), repeats


def _fixed_tp(setting: Setting) -> str:
    return f"tp{setting.ranks}"


def _best(setting: Setting) -> str:
    """The scheme that a guided run takes by itself."""
    return "hybrid4-cfg" if setting.ranks == 4 else "tp2"


def _plan(setting: Setting) -> str:
    return "hybrid" if setting.ranks == 4 else "tp"


def ar(setting: Setting) -> list[Call]:
    """Prefill and decode under fixed TP, fixed TP2 x SP2 (each replica writes by itself) and hybrid."""
    words, repeats = _repeated(setting, 5)

    def call(name: str, title: str, scheme: str, needs: int) -> Call:
        return Call("ar", name, title, ("ar", *_schemes(scheme), *_common(setting), *words), needs, repeats)

    return [
        call("ar-tp", f"fixed TP{setting.ranks}", "tp", 2),
        call("ar-tp2sp2", "fixed TP2×SP2: TP2 on each of two replicas", "replicated", 4),
        call("ar-hybrid", "hybrid: TP4 on the weights of TP2", "hybrid", 4),
    ]


def denoise(setting: Setting) -> list[Call]:
    """A guided step by plan, and by the way to compute the experts."""
    words, repeats = _repeated(setting, 5)
    own = ("--moe-layout", "micro_major", "--moe-path", "multi_micro")
    best = _best(setting)

    def call(name: str, title: str, chosen: tuple[str, ...], needs: int) -> Call:
        return Call("denoise", name, title, ("denoise", *chosen, *_common(setting), *words), needs, repeats)

    return [
        call("denoise-tp", f"fixed TP{setting.ranks}", (*_schemes(_fixed_tp(setting)), *own), 2),
        call("denoise-cfg", "hybrid: TP2×CFG2", (*_schemes("hybrid4-cfg"), *own), 4),
        call("denoise-sp", "hybrid: TP2×SP2, Ulysses and gathered keys and values", (*_schemes("hybrid4-ulysses", "hybrid4-kv_gather"), *own), 4),
        call("denoise-tp2sp2", "fixed TP2×SP2, Ulysses", (*_schemes("replicated4-ulysses"), *own), 4),
        call("denoise-experts", f"experts ({best}): multi-micro, two dispatches, expert-major, libraries", (*_schemes(best), "--moe-table"), 2),
        call("denoise-experts-sp", "experts (TP2×SP2): multi-micro, two dispatches, expert-major", (*_schemes("hybrid4-ulysses"), "--cfg", "batched"), 4),
    ]


def e2e(setting: Setting) -> list[Call]:
    """Whole pictures with texts of 750 and 460 tokens, 50 steps and the VAE; the VAE by itself."""
    words, repeats = _repeated(setting, 3)

    def call(name: str, title: str, scheme: str, needs: int) -> Call:
        return Call("e2e", name, title, ("e2e", *_schemes(scheme), *_common(setting), *words), needs, repeats)

    sizes = () if setting.small else ("--size", "1024x1024", "--size", "2048x2048")
    return [
        call("e2e-tp", f"fixed TP{setting.ranks}", _fixed_tp(setting), 2),
        call("e2e-tp2sp2", "fixed TP2×SP2, Ulysses", "replicated4-ulysses", 4),
        call("e2e-hybrid", "hybrid: AR TP4, denoise TP2×CFG2", "hybrid4-cfg", 4),
        Call("e2e", "vae", "the VAE by itself", ("vae", *sizes, *_common(setting), *words), 2, repeats),
    ]


def node(setting: Setting) -> list[Call]:
    """The same through ComfyUI: the text of the Think / Recaption node, and a picture by the stock KSampler."""
    words, repeats = _repeated(setting, 3)
    plan, cancels = _schemes(_plan(setting)), ("--cancels", "1" if setting.small else "3")
    tokens, steps = ("40", "4") if setting.small else ("750", "50")
    shared = (*plan, *_common(setting), *words, *cancels)
    return [
        Call("node", "node-text", "text in ComfyUI", ("node", "--task", "text", "--tokens", tokens, *shared), 2, repeats),
        Call("node", "node-picture", "a picture by KSampler in ComfyUI", ("node", "--task", "picture", "--steps", steps, *shared), 2, repeats),
    ]


def load(setting: Setting) -> list[Call]:
    """A checkpoint from the local disk into all ranks."""
    more = () if setting.gib is None else ("--gib", f"{setting.gib:g}")
    more += () if setting.folder is None else ("--folder", str(setting.folder))
    return [Call("load", "load", "a synthetic checkpoint from the local disk", ("load", *_schemes(_plan(setting)), *_common(setting), *more))]


def switch(setting: Setting) -> list[Call]:
    """The change from text to drawing, many times, in short pictures; the bench refuses one that moves weights or makes ranks differ."""
    words, repeats = _repeated(setting, 9)
    schemes = ("hybrid4-cfg", "hybrid4-kv_gather") if setting.ranks == 4 else ("tp2",)
    trace = ("--task", "t2i", "--tokens", "16", "--steps", "2") if setting.small else ("--task", "t2i", "--tokens", "64", "--steps", "4")
    return [Call("switch", "switch", "from text to drawing", ("e2e", *_schemes(*schemes), *trace, *_common(setting), *words), 2, repeats)]


def faults(setting: Setting) -> list[Call]:
    """A rank killed while it writes, and while it draws."""
    words = ("faults", *_schemes(_plan(setting)), "--ranks", str(setting.ranks), "--device", setting.device)
    return [Call("faults", "faults", "a killed rank", words)]


def published(setting: Setting) -> list[Call]:
    """What others published; nothing is measured."""
    return [Call("published", "published", "figures of others", (), 2, 0)]


def curves(setting: Setting) -> list[Call]:
    """A guided step by picture, prefix and ranks."""
    words, repeats = _repeated(setting, 3)

    def call(name: str, title: str, schemes: Sequence[str], ranks: int, needs: int) -> Call:
        return Call("curves", name, title, ("denoise", "--sizes", *_schemes(*schemes), *_common(setting, ranks), *words), needs, repeats)

    two = [call("curves-tp2", "TP2 on two ranks", ("tp2",), 2, 2)]
    return [
        call("curves-cfg", "hybrid: TP2×CFG2", ("hybrid4-cfg",), 4, 4),
        call("curves-sp", "hybrid: TP2×SP2, gathered keys and values", ("hybrid4-kv_gather",), 4, 4),
        call("curves-tp4", "fixed TP4", ("tp4",), 4, 4),
        *two,
    ]


PARTS: dict[str, Callable[[Setting], list[Call]]] = {
    part.__name__: part for part in (ar, denoise, e2e, node, load, switch, faults, published, curves)
}


def choose_parts(names: Sequence[str]) -> list[str]:
    """All of them without names, in the page's order. Raises BenchError for an unknown one."""
    for name in names:
        if name not in PARTS:
            raise BenchError(f"the article has no part {name!r}; its parts are {', '.join(PARTS)}.")
    return [name for name in PARTS if name in names or not names]


def choose_ranks(asked: int | None, devices: int | None) -> int:
    """``devices``: GPUs, None on a CPU. Raises BenchError when there are too few."""
    if devices is None:
        return asked or 4
    if devices < (asked or 2):
        raise BenchError(f"bench article needs {asked or 2} GPUs and this machine has {devices}; every part runs on two, all rows on four.")
    return asked or (4 if devices >= 4 else 2)
