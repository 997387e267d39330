"""Typed reading of a checkpoint's JSON files; a refusal is one sentence that names the file and the field.

Knows nothing about the model. Imports the standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...parallel.folder_files import why_not_read


class ConfigError(ValueError):
    """A checkpoint's configuration is missing, damaged, or of a kind this pack does not run."""


_REQUIRED = object()
MAX_JSON_BYTES = 16 << 20
"""Settings have some kilobytes; tokenizer_config.json, which lists every special token, a few megabytes at most."""


def read_json(path: Path) -> dict[str, Any]:
    """Parse one JSON object. Raises ConfigError when the file is absent or is not a JSON object."""
    reason = why_not_read(path, MAX_JSON_BYTES)
    if reason:
        raise ConfigError(f"{path} {reason}.")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; download the complete checkpoint folder.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); download it again.") from error
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON (line {error.lineno}); download it again.") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested deeper than any configuration; download it again.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not contain a JSON object; download it again.")
    return values


@dataclass(frozen=True)
class Fields:
    """One JSON object and the name it has in messages."""

    values: dict[str, Any]
    where: str

    def _get(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(
                    f"{self.where} has no field {name}; use the checkpoint's own complete file."
                )
            return default
        return value

    def refuse(self, name: str, value: object, supported: str) -> None:
        """Raise the sentence for a value this pack does not run."""
        raise ConfigError(
            f"{self.where}: {name} is {value!r}, but only {supported} is supported; "
            "use a released checkpoint."
        )

    def integer(self, name: str, *, default: object = _REQUIRED, smallest: int = 1) -> int:
        """A whole number not below `smallest`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            self.refuse(name, value, f"a whole number from {smallest}")
        return value

    def number(self, name: str, *, default: object = _REQUIRED, positive: bool = True) -> float:
        """A finite number, above zero unless `positive` is false."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            self.refuse(name, value, "a finite number")
        if positive and value <= 0:
            self.refuse(name, value, "a number above zero")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def word(self, name: str, allowed: tuple[str, ...], *, default: object = _REQUIRED) -> Any:
        """One of a few words."""
        value = self._get(name, default)
        if value not in allowed:
            self.refuse(name, value, " or ".join(allowed))
        return value

    def only(self, name: str, supported: object) -> None:
        """Refuse every present value except the one that is implemented."""
        value = self._get(name, supported)
        if value != supported:
            self.refuse(name, value, f"{supported!r}")

    def integers(self, name: str, *, smallest: int = 1) -> tuple[int, ...]:
        """A non-empty list of whole numbers; a single number counts as a list of one."""
        value = self._get(name, _REQUIRED)
        items = value if isinstance(value, list) else [value]
        if not items:
            self.refuse(name, value, "a list with at least one whole number")
        return tuple(Fields({name: item}, self.where).integer(name, smallest=smallest) for item in items)

    def per_layer(self, name: str, layers: int) -> tuple[int, ...]:
        """One whole number per layer, from one number for all layers or from a list."""
        values = self.integers(name)
        if not isinstance(self.values[name], list):
            return values * layers
        if len(values) != layers:
            self.refuse(name, self.values[name], f"one entry for each of the {layers} layers")
        return values

    def token_id(self, name: str) -> int | None:
        """A token id, or None where the file does not say; of a list (several end tokens) the first."""
        if self.values.get(name) is None:
            return None
        return self.integers(name, smallest=0)[0]

    def section(self, name: str) -> Fields:
        """A nested JSON object."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, dict):
            self.refuse(name, value, "a JSON object")
        return Fields(value, f"{self.where}: {name}")
