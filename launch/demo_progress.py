"""What the demo shows while it runs: one line per phase with its tokens or steps, and its seconds."""

from __future__ import annotations

from typing import Any, TextIO

COUNTED = {"AR": "tokens"}  # every other phase that counts, counts steps


class DemoProgress:
    """Fed with rank 0's status a few times a second. `seconds`: phase -> seconds, in order of appearance.

    A section's seconds stay in the status until the next section ends, so no section is missed that is
    followed by one longer than the time between two looks.
    """

    def __init__(self, out: TextIO) -> None:
        self.seconds: dict[str, float] = {}
        self._out = out
        self._live = out.isatty()
        self._last_section: dict[str, float] = {}
        self._shown = ""
        self._phase = "idle"

    def look(self, status: dict[str, Any]) -> None:
        report = status["ranks"][0]
        if report is None:
            return
        section = report["phase_seconds"]
        if section != self._last_section:
            self._last_section = section
            for phase, seconds in section.items():
                self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        phase = report["phase"]
        if phase != self._phase:
            self._end_line()
            self._phase = phase
        if phase != "idle":
            self._show(_line(report))

    def close(self) -> None:
        self._end_line()

    def _show(self, line: str) -> None:
        if line == self._shown:
            return
        if self._live:
            self._out.write("\r" + line.ljust(len(self._shown)))
            self._out.flush()
        self._shown = line

    def _end_line(self) -> None:
        if self._shown:
            # Without a terminal only the last state of each phase is worth a line.
            self._out.write("\n" if self._live else self._shown + "\n")
            self._out.flush()
        self._shown = ""


def _line(report: dict[str, Any]) -> str:
    phase, done, total = report["phase"], report["done"], report["total"]
    if not total:
        return f"{phase} ..."
    unit = COUNTED.get(phase, "steps")
    filled = 24 * min(done, total) // total
    speed = ""
    if unit == "tokens" and report["tokens_per_s"]:
        speed = f", {report['tokens_per_s']:.1f} tokens/s"
    elif unit == "steps" and report["s_per_step"]:
        speed = f", {report['s_per_step']:.2f} s/step"
    return f"{phase:<12} [{'#' * filled}{'.' * (24 - filled)}] {done}/{total} {unit}{speed}"
