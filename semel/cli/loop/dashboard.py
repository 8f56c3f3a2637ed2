"""What a running loop shows: a display that stays in place on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from semel.loop import LoopConfig

LINE_EVERY_S = 10.0
SPARKS = "▁▂▃▄▅▆▇█"


class Dashboard:
    """``say(text)`` and ``dashboard(sample)``; a context manager."""

    def __init__(self, console: Console, config: LoopConfig) -> None:
        self._console, self._config = console, config
        self._live: Any = None
        self._said: deque[str] = deque(maxlen=5)
        self._gaps: deque[float] = deque(maxlen=600)
        self._sample: dict[str, Any] | None = None
        self._last_line = 0.0

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        self._said.append(f"{time.strftime('%H:%M:%S')}  {text}")
        if self._live is None:
            self._console.print(text, style="dim", markup=False, soft_wrap=True)
        elif self._sample is not None:
            self._live.update(self.render(self._sample))

    def __call__(self, sample: dict[str, Any]) -> None:
        self._sample = sample
        if sample["gap"] is not None:
            self._gaps.append(sample["gap"])
        if not self._console.is_terminal:
            if time.monotonic() - self._last_line >= LINE_EVERY_S and sample["requests"]:
                self._last_line = time.monotonic()
                self._console.print(line(sample), markup=False, soft_wrap=True)
            return
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._live.update(self.render(sample))

    def render(self, sample: dict[str, Any]) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        config = self._config
        served = "the simulated site" if config.data is None else f"{config.data}, {config.speedup:g}x"
        title = f"semel loop  {config.recipe}, {served}  {clock(sample['elapsed_s'])}"
        beside = Table.grid(padding=(0, 4))
        beside.add_row(figures(sample), processes(sample))
        parts: list[RenderableType] = [beside]
        if len(self._gaps) > 1:
            parts.append(Text(f"gap to the best NE  {spark(list(self._gaps), 48)}  {self._gaps[-1]:+.4f}"))
        parts += [Text(text, style="dim", overflow="ellipsis", no_wrap=True) for text in self._said]
        return Panel(Group(*parts), title=title, title_align="left", padding=(1, 2))


def figures(sample: dict[str, Any]) -> Table:
    """The figures of now, in groups of what they are about."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in rows_of(sample):
        table.add_row(name, value)
    return table


def rows_of(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures of a sample in words."""
    late = f", {sample['behind_s']:.1f} s behind" if (sample["behind_s"] or 0) > 0.5 else ""
    rows = [
        ("requests", f"{sample['requests']:,}  {number(sample['requests_per_s'], '.1f')}/s{late}"),
        ("latency p50, p99", f"{number(sample['p50_ms'], '.1f')}, {number(sample['p99_ms'], '.1f')} ms"),
        ("NE served", number(sample["served_ne"], ".4f")),
    ]
    if sample["best_ne"] is not None:
        rows.append(("NE best reachable", number(sample["best_ne"], ".4f")))
    rows += [
        ("NE prequential", number(sample["prequential_ne"], ".4f")),
        ("skew", number(sample["skew"], "+.5f")),
        ("coverage", number(sample["coverage"], ".2%")),
        ("new item to shown p50, p99", f"{number(sample['item_shown_p50_s'], '.2f')}, "
                                       f"{number(sample['item_shown_p99_s'], '.2f')} s"),
        ("event to visible p99", f"{number(sample['event_visible_p99_ms'], '.0f')} ms"),
        ("to be sent", f"{sample['events_waiting']} events, {sample['outcomes_waiting']} outcomes"),
        ("windows open", f"{sample['windows_open']:,} requests"),
        ("to be trained on", f"{sample['files_waiting']} files"),
        ("model", sample["model_version"] or "–"),
    ]
    failed = sum(sample["failed"].values())
    if failed:
        rows.append(("attempts repeated", f"{failed:,}"))
    if sample["stale_reads"]:
        rows.append(("stale reads", f"{sample['stale_reads']:,}"))
    return rows


def processes(sample: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("process", "up", "restarts", "memory"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, facts in sample["processes"].items():
        up = f"[green]{clock(facts['seconds'])}[/green]" if facts["up"] else "[red]down[/red]"
        restarts = str(facts["restarts"]) + (f" ({facts['hangs']} hung)" if facts["hangs"] else "")
        table.add_row(name, up, restarts, f"{facts['rss_mb']:.0f} MB" if facts["rss_mb"] else "–")
    return table


def line(sample: dict[str, Any]) -> str:
    """A sample in one line."""
    down = [name for name, facts in sample["processes"].items() if not facts["up"]]
    parts = [clock(sample["elapsed_s"]), f"{sample['requests']:,} requests",
             f"{number(sample['requests_per_s'], '.1f')}/s", f"p99 {number(sample['p99_ms'], '.0f')} ms",
             f"NE {number(sample['served_ne'], '.4f')}"]
    if sample["best_ne"] is not None:
        parts.append(f"best {number(sample['best_ne'], '.4f')}, gap {number(sample['gap'], '+.4f')}")
    parts.append(f"prequential {number(sample['prequential_ne'], '.4f')}")
    parts.append(f"{sample['files_waiting']} files wait")
    return ", ".join(parts) + (f"; down: {', '.join(down)}" if down else "")


def spark(values: list[float], width: int) -> str:
    """A line of bars: means of as many stretches as it is wide."""
    width = min(width, len(values))
    cut = [values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in cut]
    low, high = min(means), max(means)
    return "".join(SPARKS[round((len(SPARKS) - 1) * (mean - low) / (high - low))] if high > low else SPARKS[0]
                   for mean in means)


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def clock(seconds: float) -> str:
    """``1:02:03``, or ``2:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
