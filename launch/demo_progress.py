"""What the demo shows while it runs: one line per phase with its tokens or steps, and its seconds."""

from __future__ import annotations

from typing import Any, TextIO

from ..parallel.rank_record import CALL

COUNTED = {"AR": "tokens", "VAE decode": "blocks"}  # every other phase that counts, counts steps
# A section bears its operation's name until the operation names its phase. A demo's text is too short to show its two halves.
FOLDED = {
    "generate_text": "AR",
    "AR prefill": "AR",
    "AR decode": "AR",
    "sample": "denoise",
    "encode_references": "image encode",
    "vae_decode": "VAE decode",
    "vae_encode": "VAE encode",
}
_BAR = 24

Report = dict[str, Any]


class DemoProgress:
    """Fed with rank 0's status several times a second. `seconds`: phase -> seconds, as they appear.

    The seconds of a section stay in the status until the next section ends. So a phase too short to be seen
    at work still gets its line, unless the section behind it is as short.
    """

    def __init__(self, out: TextIO, *, before: dict[str, Any] | None = None) -> None:
        """``before``: the status ahead of the prompt, where others have run: their seconds are still in it."""
        self.seconds: dict[str, float] = {}
        self._out = out
        self._live = out.isatty()
        first = None if before is None else before["ranks"][0]
        self._last_section: dict[str, float] = {} if first is None else first["phase_seconds"]
        # The phase at work and its latest report; its line is on the terminal but not finished.
        self._at_work: Report | None = None
        self._finished: set[str] = set()
        self._width = 0

    def look(self, status: dict[str, Any]) -> None:
        report = status["ranks"][0]
        if report is None:
            return
        report = {**report, "phase": FOLDED.get(report["phase"], report["phase"])}
        if self._at_work is not None and report["phase"] != self._at_work["phase"] and not self._between_steps(report):
            self._finish(report)
        if report["phase_seconds"] != self._last_section:
            self._last_section = report["phase_seconds"]
            self._add_section(report)
        if report["phase"] != "idle":
            self._at_work = report
            if self._live:
                self._write("\r", _line(report), "")

    def end(self) -> None:
        """The prompt has ended, and the phase at work with it."""
        if self._at_work is not None:
            self._finish(self._at_work)

    def _between_steps(self, report: Report) -> bool:
        """Each step of a stock sampler is a section of its own, and the ranks are idle before the next one."""
        return report["phase"] == "idle" and self._at_work is not None and self._at_work.get("unit") == CALL

    def _add_section(self, report: Report) -> None:
        for name, seconds in report["phase_seconds"].items():
            phase = FOLDED.get(name, name)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        for phase in self.seconds:
            working = self._at_work is not None and self._at_work["phase"] == phase
            if phase not in self._finished and not working:
                self._finished.add(phase)
                self._write("", f"{phase:<12} {self.seconds[phase]:.2f} s{_speed(phase, report)}", "\n")

    def _finish(self, after: Report) -> None:
        """A phase that has given way to another one has done all of its steps."""
        assert self._at_work is not None
        # The speed of a phase stays in later reports; its count does not.
        speeds = {name: after[name] for name in ("tokens_per_s", "s_per_step")}
        ended = COUNTED.get(self._at_work["phase"]) == "tokens" and self._at_work["done"] < self._at_work["total"]  # a text may end before its limit
        report = {**self._at_work, **speeds, "done": self._at_work["total"], "total": 0 if ended else self._at_work["total"]}
        self._at_work = None
        self._finished.add(report["phase"])
        line = (
            _line(report)
            if report["total"]
            else f"{report['phase']:<12} done{_speed(report['phase'], report)}"
        )
        self._write("\r" if self._live else "", line, "\n")
        self._width = 0

    def _write(self, before: str, line: str, after: str) -> None:
        self._out.write(before + line.ljust(self._width) + after)
        self._out.flush()
        self._width = 0 if after else len(line)


def _line(report: Report) -> str:
    phase, done, total = report["phase"], report["done"], report["total"]
    if not total:
        return f"{phase:<12} ..."
    filled = _BAR * min(done, total) // total
    bar = "#" * filled + "." * (_BAR - filled)
    return f"{phase:<12} [{bar}] {done}/{total} {COUNTED.get(phase, 'steps')}{_speed(phase, report)}"


def _speed(phase: str, report: Report) -> str:
    if COUNTED.get(phase) == "tokens" and report["tokens_per_s"]:
        return f", {report['tokens_per_s']:.1f} tokens/s"
    if phase == "denoise" and report["s_per_step"]:
        return f", {report['s_per_step']:.2f} s/step"
    return ""
