"""The plots of the report as Plotly JSON. Colours are the page's CSS variables, so one figure serves light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from semel.cli.report.page import Figure


@dataclass(frozen=True)
class Estimate:
    """A measured value with its interval; ``low`` and ``high`` may be None."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


def series(number: int) -> str:
    """The colour of the ``number``-th series (1 to 5); 0 is grey, for what things are compared with."""
    return f"var(--series-{number})"


def curves(lines: Mapping[str, tuple[Sequence[float], Sequence[float | None]]], caption: str, x: str, y: str) -> Figure:
    """Lines by name: (x values, y values); a line breaks where a value is None."""
    data = []
    for number, (name, (steps, values)) in enumerate(lines.items(), start=1):
        data.append({
            "type": "scatter", "mode": "lines+markers" if len(values) <= 40 else "lines", "name": name,
            "x": list(steps), "y": list(values), "line": {"color": series(number), "width": 2.5},
            "marker": {"size": 6}, "hovertemplate": f"{x} %{{x}}: %{{y:.4g}}<extra>{name}</extra>",
        })
    longest = max((len(line["x"]) for line in data), default=0)
    axis = {"title": {"text": x}, **({"dtick": 1} if 1 < longest <= 12 else {})}
    return Figure(data, {"xaxis": axis, "yaxis": {"title": {"text": y}}, "showlegend": len(data) > 1}, caption)


def length_histogram(lengths: Any, caption: str, x: str, marks: Mapping[str, float] | None = None) -> Figure:
    """How many histories have how many events, in bins that double (four a doubling); ``marks``: lines at lengths."""
    lengths = np.asarray(lengths)
    top = max(int(lengths.max(initial=1)), 2)
    edges = np.unique(np.round(2.0 ** np.arange(0, np.log2(top) + 0.51, 0.25)).astype(np.int64))
    edges = np.append(edges, top + 1) if edges[-1] <= top else edges
    counts, _ = np.histogram(lengths[lengths > 0], bins=edges)
    low, high = edges[:-1], edges[1:]
    bars = {
        "type": "bar", "x": np.sqrt(low * high.astype(float)), "y": counts, "width": (high - low) * 0.94,
        "marker": {"color": series(1)}, "customdata": np.stack([low, high - 1], axis=1),
        "hovertemplate": "%{customdata[0]} to %{customdata[1]} events: %{y:,}<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": x}, "type": "log", "dtick": "D2" if top < 300 else 1, "tickformat": ",d"},
              "yaxis": {"title": {"text": "histories"}, "tickformat": ",d"}, "bargap": 0, "showlegend": False}
    _vertical(layout, marks or {}, logarithmic=True)
    return Figure([bars], layout, caption)


def reliability(bins: Sequence[Mapping[str, float]], caption: str) -> Figure:
    """``bins``: ``predicted`` (mean), ``observed`` (rate) and ``count``. Bars: Wilson's 95 % intervals of the rate."""
    predicted = np.array([b["predicted"] for b in bins])
    observed = np.array([b["observed"] for b in bins])
    count = np.array([b["count"] for b in bins], dtype=float)
    low, high = wilson(observed, count)
    points = {
        "type": "scatter", "mode": "markers", "x": predicted, "y": observed, "customdata": count,
        "marker": {"color": series(1), "size": 7 + 11 * np.sqrt(count / max(count.max(initial=1), 1)),
                   "line": {"width": 1.5, "color": "var(--paper)"}},
        "error_y": {"type": "data", "symmetric": False, "array": high - observed, "arrayminus": observed - low,
                    "color": series(1), "thickness": 1.5, "width": 0},
        "hovertemplate": "predicted %{x:.3f}, happened %{y:.3f}<br>%{customdata:,} candidates<extra></extra>",
    }
    diagonal = {"type": "scatter", "mode": "lines", "x": [0, 1], "y": [0, 1], "hoverinfo": "skip",
                "line": {"color": series(0), "width": 1.5, "dash": "dot"}}
    layout = {"xaxis": {"title": {"text": "predicted probability"}, "range": [0, 1], "tickformat": ".1f"},
              "yaxis": {"title": {"text": "how often it happened"}, "range": [0, 1], "tickformat": ".1f"},
              "showlegend": False}
    return Figure([diagonal, points], layout, caption, height=340)


def columns(places: Mapping[str, float], counts: Sequence[float], caption: str, x: str, y: str) -> Figure:
    """Upright bars: ``places`` on the x axis by name, and how high each is."""
    at = list(places.values())
    step = min(np.diff(at), default=1.0) if len(at) > 1 else 0.05
    data = {"type": "bar", "x": at, "y": list(counts), "width": [step * 0.92] * len(at), "customdata": list(places),
            "marker": {"color": series(1)}, "hovertemplate": "%{customdata}: %{y:,}<extra></extra>"}
    layout = {"xaxis": {"title": {"text": x}, "range": [0, 1], "tickformat": ".1f"},
              "yaxis": {"title": {"text": y}, "tickformat": ",d"}, "showlegend": False}
    return Figure([data], layout, caption, height=340)


def latency_histogram(milliseconds: Any, caption: str) -> Figure:
    """The distribution of latencies, cut at the 99.5th percentile; lines at p50 and p99."""
    values = np.asarray(milliseconds, dtype=float)
    p50, p99 = np.percentile(values, [50, 99])
    shown = values[values <= np.percentile(values, 99.5)]
    counts, edges = np.histogram(shown, bins=min(48, max(8, len(values) // 8)))
    bars = {
        "type": "bar", "x": (edges[:-1] + edges[1:]) / 2, "y": counts, "width": np.diff(edges) * 0.92,
        "marker": {"color": series(1)}, "hovertemplate": "%{x:.1f} ms: %{y} requests<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": "milliseconds, measured by the client"}, "rangemode": "tozero"},
              "yaxis": {"title": {"text": "requests"}}, "showlegend": False}
    _vertical(layout, {f"p50 {p50:.1f}": p50, f"p99 {p99:.1f}": p99})
    return Figure([bars], layout, caption)


def bars(values: Mapping[str, float], caption: str, x: str, texts: Sequence[str] | None = None,
         highlight: str | None = None) -> Figure:
    """Horizontal bars from top to bottom; ``texts`` stand at their ends; all grey but the ``highlight``, if one."""
    names = list(values)
    data = {
        "type": "bar", "orientation": "h", "y": [",<br>".join(name.rsplit(", ", 1)) for name in names],  # for a phone
        "x": list(values.values()),
        "text": list(texts) if texts else None, "textposition": "outside", "cliponaxis": False,
        "textfont": {"color": "var(--ink)", "size": 13},
        "marker": {"color": [series(1 if highlight in (None, name) else 0) for name in names]},
        "hovertemplate": "%{y}: %{x:,.4g}<extra></extra>",
    }
    top = max(values.values(), default=1.0)
    layout = {"xaxis": {"title": {"text": x}, "range": [0, top * (1.28 if texts else 1.05)], "nticks": 5},
              "yaxis": {"autorange": "reversed", "showgrid": False, "tickfont": {"color": "var(--ink)", "size": 13}},
              "bargap": 0.38, "showlegend": False}
    return Figure([data], layout, caption, height=90 + 42 * len(names))


def spans(rows: Mapping[str, Sequence[tuple[str, float, float, bool]]], caption: str) -> Figure:
    """What each row did when: (name, start, milliseconds, whether it waited), waits over work, in grey."""
    names = list(dict.fromkeys(name for row in rows.values() for name, *_, waits in row if not waits))
    colours = {name: series(1 + number % 5) for number, name in enumerate(names)}
    data = []
    for waits in (False, True):
        for name in dict.fromkeys(name for row in rows.values() for name, *_, idle in row if idle == waits):
            bars = [(title, start, length) for title, row in rows.items() for other, start, length, idle in row
                    if other == name and idle == waits]
            data.append({
                "type": "bar", "orientation": "h", "name": f"waits: {name.replace('_', ' ')}" if waits else name,
                "y": [title for title, *_ in bars], "base": [start for _, start, _ in bars],
                "x": [length for *_, length in bars],
                "marker": {"color": series(0) if waits else colours[name]},
                "hovertemplate": f"{name}: %{{x:.2f}} ms<extra></extra>"})
    layout = {"barmode": "overlay", "bargap": 0.3, "xaxis": {"title": {"text": "milliseconds"}},
              "yaxis": {"autorange": "reversed", "showgrid": False, "tickfont": {"color": "var(--ink)", "size": 13}},
              "showlegend": True, "legend": {"orientation": "h", "y": -0.5, "yanchor": "top"}}
    return Figure(data, layout, caption, height=260 + 40 * len(rows))


def estimates(rows: Sequence[Estimate], caption: str, x: str, highlight: str | None = None) -> Figure:
    """A dot and its interval for each row, from top to bottom; the ``highlight`` in colour."""
    data = []
    for row in rows:
        color = series(1 if row.name == highlight else 0)
        low, high = (row.value if end is None else end for end in (row.low, row.high))
        data.append({
            "type": "scatter", "mode": "markers", "x": [row.value], "y": [row.name], "showlegend": False,
            "marker": {"color": color, "size": 12},
            "error_x": {"type": "data", "symmetric": False, "array": [high - row.value],
                        "arrayminus": [row.value - low], "color": color, "thickness": 2.5, "width": 5},
            "hovertemplate": f"%{{y}}: %{{x:.4f}}<br>{low:.4f} to {high:.4f}<extra></extra>",
        })
    layout = {"xaxis": {"title": {"text": x}, "nticks": 6},
              "yaxis": {"autorange": "reversed", "showgrid": False, "tickfont": {"color": "var(--ink)", "size": 13}}}
    return Figure(data, layout, caption, height=100 + 38 * len(rows))


def buckets(rows: Sequence[Estimate], caption: str, x: str, y: str) -> Figure:
    """An estimate for each of some ordered buckets, joined by a line."""
    low = [0.0 if r.low is None else r.value - r.low for r in rows]
    high = [0.0 if r.high is None else r.high - r.value for r in rows]
    data = {
        "type": "scatter", "mode": "lines+markers", "x": [r.name for r in rows], "y": [r.value for r in rows],
        "line": {"color": series(1), "width": 2}, "marker": {"size": 9},
        "error_y": {"type": "data", "symmetric": False, "array": high, "arrayminus": low, "color": series(1),
                    "thickness": 1.5, "width": 4},
        "hovertemplate": "%{x}: %{y:.4f}<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": x}, "type": "category"}, "yaxis": {"title": {"text": y}}, "showlegend": False}
    return Figure([data], layout, caption)


def wilson(rate: np.ndarray, count: np.ndarray, z: float = 1.96) -> tuple[np.ndarray, np.ndarray]:
    """The interval of a rate seen in ``count`` trials (Wilson 1927): low and high, within [0, 1]."""
    count = np.maximum(count, 1)
    center = (rate + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2))
    return np.minimum(center - half, rate).clip(0, 1), np.maximum(center + half, rate).clip(0, 1)


def _vertical(layout: dict[str, Any], marks: Mapping[str, float], logarithmic: bool = False) -> None:
    """Dashed lines with a name at the top, in an existing layout."""
    layout["shapes"] = [
        {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": series(2), "width": 1.75, "dash": "dash"}} for at in marks.values()
    ]
    layout["annotations"] = [
        {"x": float(np.log10(at)) if logarithmic else at, "y": 1.0, "yref": "paper", "yanchor": "bottom",
         "text": name, "showarrow": False, "font": {"size": 12, "color": series(2)}} for name, at in marks.items()
    ]
    layout["margin"] = {"t": 26}
