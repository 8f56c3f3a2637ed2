"""One self-contained HTML page: key numbers, sections of prose, plots and tables. No file or host is loaded by it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
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
    """A plot: ``data`` and ``layout`` as Plotly's JSON. Colours may be CSS variables (``var(--series-1)``), which the
    page resolves in light and in dark. ``height`` in pixels; ``wide`` spans both columns of a section."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]
    caption: str
    height: int = 300
    wide: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: the first column is text, the others numbers as they should read. ``strong``: rows to set in bold."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Section:
    """``text``: paragraphs in plain words (no markup)."""

    title: str
    text: Sequence[str]
    figures: Sequence[Figure] = ()
    grid: Grid | None = None

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower()).strip("-")


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    cards: Sequence[Card] = ()
    sections: Sequence[Section] = ()
    facts: dict[str, str] = field(default_factory=dict)


def render(page: Page) -> str:
    """The page as HTML. Text is escaped; plotly.js is inlined once."""
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )
    environment.filters["id_of"] = id
    figures = [figure for section in page.sections for figure in section.figures]
    return environment.get_template("template.html.j2").render(
        page=page,
        number_of={id(figure): number for number, figure in enumerate(figures)},
        figures=_script_safe([{"data": f.data, "layout": f.layout} for f in figures]),
        plotly=get_plotlyjs() if figures else "",
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def write(page: Page, path: Path) -> Path:
    """Write the page and return where it is. FileNotFoundError if the folder is missing."""
    path.write_text(render(page), encoding="utf-8")
    return path


def _script_safe(value: Any) -> str:
    """JSON that may stand inside a script element."""
    from semel.cli.output import plain

    text = json.dumps(plain(value), separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
