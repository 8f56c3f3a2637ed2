"""One self-contained page: key numbers, sections of prose, plots, tables and a timeline. It loads no file and no
host."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Card:
    """One key number at the top of the page."""

    title: str
    value: str
    note: str


@dataclass(frozen=True)
class Figure:
    """A plot: ``data`` and ``layout`` as Plotly's JSON, whose colours may be CSS variables (``var(--series-1)``) that
    the page resolves in light and in dark. ``height`` in pixels; ``wide`` spans both columns."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]
    caption: str
    height: int = 320
    wide: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: the first column is text, the others numbers, but those in ``prose``. ``strong``: rows in bold."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[int] = frozenset()
    prose: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Section:
    """``text``: paragraphs without markup. ``timeline``: whether the page's timeline stands here (once a page)."""

    title: str
    text: Sequence[str]
    figures: Sequence[Figure] = ()
    grid: Grid | None = None
    timeline: bool = False

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower()).strip("-")


@dataclass(frozen=True)
class Page:
    """``timelines``: each ``{"name", "seconds", "lanes": [{"name", "thin", "ops": [[start, end, letter, label,
    part]]}]}`` with the operations of a lane in order of their start."""

    title: str
    subtitle: str
    cards: Sequence[Card] = ()
    sections: Sequence[Section] = ()
    timelines: Sequence[Mapping[str, Any]] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def render(page: Page) -> str:
    """The page as HTML. Text is escaped; plotly.js is inlined once."""
    import jinja2
    from plotly.offline import get_plotlyjs

    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )
    environment.filters["id_of"] = id
    figures = [figure for section in page.sections for figure in section.figures]
    return environment.get_template("template.html.j2").render(
        page=page,
        number_of={id(figure): number for number, figure in enumerate(figures)},
        figures=_script_safe([{"data": f.data, "layout": f.layout} for f in figures]),
        timelines=_script_safe(page.timelines),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def write(page: Page, path: Path) -> Path:
    """Write the page and return where it is. FileNotFoundError if its folder is missing."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    path.write_text(render(page), encoding="utf-8")
    return path


def _script_safe(value: Any) -> str:
    """JSON that may stand inside a script element; infinities and NaN are null, numbers have 7 digits."""
    text = json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
