"""TOML of planning files: fields with units, where each coefficient comes from, and clear errors."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from semel.planning.units import parse

LIBRARY = Path(__file__).parent / "library"
KINDS = ("clusters", "jobs", "searches", "measurements", "devices", "technologies")

_REQUIRED: Any = object()


@dataclass(frozen=True)
class Origin:
    """Where a coefficient comes from: a ``source`` (published, measured), or it is ``assumed`` (a guess, and why)."""

    text: str
    assumed: bool


def ready(kind: str) -> list[tuple[str, str]]:
    """(name, description) of every ready file of ``kind``, one of ``KINDS``, by name."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; there are: {', '.join(KINDS)}")
    return [(path.stem, str(read_toml(path).get("description", ""))) for path in _library(kind)]


def read_toml(path: str | Path) -> dict[str, Any]:
    """The parsed file; ValueError names the file and the line of a mistake."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None


def find(kind: str, name: str | Path) -> Path:
    """The file at a path, or the ready one of that name; FileNotFoundError names the nearest one."""
    path = Path(name)
    if path.suffix == ".toml" or len(path.parts) > 1:
        if path.is_file():
            return path
        raise FileNotFoundError(f"{path}: {'a folder, not a' if path.is_dir() else 'no such'} file; ready {kind}: "
                                f"{', '.join(each.stem for each in _library(kind))}")
    ours = LIBRARY / kind / f"{name}.toml"
    if ours.is_file():
        return ours
    if path.is_file():
        return path
    known = [each.stem for each in _library(kind)]
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.55)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    raise FileNotFoundError(f"{name}: neither a file nor a ready one of {kind}; {hint}")


def _library(kind: str) -> list[Path]:
    return sorted((LIBRARY / kind).glob("*.toml"))


def open_section(kind: str, source: str | Path | Mapping) -> Section:
    """The top of a planning file: of a path, a ready name, or a mapping parsed elsewhere."""
    if isinstance(source, Mapping):
        return Section(_like(kind, dict(source)), kind.rstrip("s"), str(source.get("like", "")))
    path = find(kind, source)
    place = str(path) if path.parent != LIBRARY / kind else path.stem
    return Section(_like(kind, read_toml(path)), place, path.stem)


def _like(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """``like = "name"`` takes all fields of another file but those given here."""
    if kind not in ("jobs", "clusters") or not isinstance(data.get("like"), str):
        return data
    base = _like(kind, read_toml(find(kind, data["like"])))
    return {**base, **{key: value for key, value in data.items() if key != "like"}}


class Section:
    """One table of a TOML file. Reading a key takes it; ``done`` refuses what nobody read.

    A value may be written plainly, or as ``{ value = ..., source = "..." }`` or ``{ value = ..., assumed = "..." }``;
    ``origins`` collects those notes under dotted paths.
    """

    def __init__(self, data: dict[str, Any], place: str, stem: str, path: str = "",
                 origins: dict[str, Origin] | None = None) -> None:
        self.place, self.stem, self.path = place, stem, path
        self.origins: dict[str, Origin] = {} if origins is None else origins
        self._data, self._read = data, set[str]()

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def where(self, key: str) -> str:
        return f"{self.place}: {self._dotted(key)}"

    def _dotted(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def fail(self, key: str, reason: str) -> NoReturn:
        raise ValueError(f"{self.where(key)}: {reason}")

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The raw value of ``key``; its origin is noted. ValueError if it is missing and has no default."""
        self._read.add(key)
        if key not in self._data:
            if default is _REQUIRED:
                near = difflib.get_close_matches(key, [k for k in self._data if k not in self._read], n=1, cutoff=0.75)
                self.fail(key, f"is missing; {near[0]!r} is unknown, did you mean {key!r}?" if near else "is missing")
            return default
        value = self._data[key]
        if isinstance(value, dict) and "value" in value:
            extra = set(value) - {"value", "source", "assumed"}
            if extra:
                self.fail(key, f"unknown note {sorted(extra)[0]!r}; a value carries source or assumed")
            if "source" in value and "assumed" in value:
                self.fail(key, "carries both source and assumed; give one")
            for note in ("source", "assumed"):
                if note in value:
                    self.origins[self._dotted(key)] = Origin(str(value[note]), note == "assumed")
            value = value["value"]
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        value = self.take(key, default)
        if not isinstance(value, str):
            self.fail(key, f"expected text, got {value!r}")
        return value

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"expected true or false, got {value!r}")
        return value

    def choice(self, key: str, known: Iterable[str], default: Any = _REQUIRED) -> str:
        value, known = self.text(key, default), list(known)
        if value not in known:
            near = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
            self.fail(key, f"unknown value {value!r}; " + (f"did you mean {near[0]!r}?" if near else
                                                          f"there are: {', '.join(known)}"))
        return value

    def count(self, key: str, default: Any = _REQUIRED, least: int = 1) -> int:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"expected a whole number, got {value!r}")
        if value < least:
            self.fail(key, f"must be at least {least}, got {value}")
        return value

    def counts(self, key: str, default: Any = _REQUIRED) -> tuple[int, ...]:
        value = self.take(key, default)
        if not isinstance(value, (list, tuple)) or not all(type(n) is int and n > 0 for n in value):
            self.fail(key, f"expected a list of whole numbers above 0, got {value!r}")
        return tuple(value)

    def number(self, key: str, default: Any = _REQUIRED, least: float = 0.0, most: float = float("inf")) -> float:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(key, f"expected a number, got {value!r}")
        if not least <= value <= most:
            self.fail(key, f"must lie in {least:g}..{most:g}, got {value:g}")
        return float(value)

    def quantity(self, key: str, kind: str, default: Any = _REQUIRED) -> float:
        """A value with a unit (``semel.planning.units``), in base units. ``default`` is in base units already."""
        if key not in self._data and default is not _REQUIRED:
            self._read.add(key)
            return float(default)
        return parse(self.take(key), kind, self.where(key))

    def section(self, key: str) -> Section:
        value = self.take(key, {})
        if not isinstance(value, dict):
            self.fail(key, f"expected a table [{self._dotted(key)}], got {value!r}")
        return Section(value, self.place, self.stem, self._dotted(key), self.origins)

    def sections(self, key: str) -> list[Section]:
        """The tables [[key]]; each is called by its ``name`` in paths."""
        value = self.take(key, [])
        if not isinstance(value, list) or any(not isinstance(each, dict) for each in value):
            self.fail(key, f"expected tables [[{self._dotted(key)}]], got {value!r}")
        named = [each.get("name", str(index)) for index, each in enumerate(value)]
        return [Section(each, self.place, self.stem, f"{self._dotted(key)}.{name}", self.origins)
                for each, name in zip(value, named, strict=True)]

    def keys(self) -> list[str]:
        return list(self._data)

    def done(self) -> None:
        """Refuses keys that nobody asked for, naming the nearest one that is known."""
        unread = [key for key in self._data if key not in self._read]
        if unread:
            near = difflib.get_close_matches(unread[0], sorted(self._read), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(self._read))}"
            raise ValueError(f"{self.where(unread[0])}: unknown field; {hint}")
