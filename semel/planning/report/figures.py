"""The plots of a plan's page as Plotly JSON. Colours are the page's CSS variables, so one figure serves light and
dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from semel.planning.report.page import Figure

if TYPE_CHECKING:
    from semel.planning.plan import Plan
    from semel.planning.simulate import Trace

GB = 1e9
MOST_STAGES = 24
"""Lanes of a timeline: of more stages, evenly spread ones are drawn."""
MOST_OPERATIONS = 60_000


def series(number: int) -> str:
    """The colour of the ``number``-th series (1 to 6); 0 is grey, for what things are compared with."""
    return f"var(--series-{number})"


def some_stages(count: int, most: int) -> list[int]:
    """Up to ``most`` of ``count`` stages, evenly spread, first and last among them."""
    return sorted({round(at) for at in np.linspace(0, count - 1, min(count, most))})


def timeline(name: str, trace: Trace) -> dict[str, Any]:
    """What the page's canvas draws: a lane of operations for each stage, and a thin one below it of its transfers."""
    schedule, rows = trace.schedule, trace.records
    stages = schedule.devices
    longest = int(np.diff(schedule.offsets).max(initial=1))
    chosen = some_stages(stages, max(2, min(MOST_STAGES, MOST_OPERATIONS // longest)))
    lanes: list[dict[str, Any]] = []
    for device in chosen:
        part = slice(schedule.offsets[device], schedule.offsets[device + 1])
        operations = [[start, end, "FBIW"[kind], microbatch, chunk] for start, end, kind, microbatch, chunk in zip(
            trace.op_start[part].tolist(), trace.op_end[part].tolist(), schedule.kinds[part].tolist(),
            schedule.microbatches[part].tolist(), schedule.chunks[part].tolist(), strict=True)]
        lanes.append({"name": f"stage {device}", "thin": False, "ops": operations})
        mine = np.flatnonzero(rows["device"] == device)
        mine = mine[np.argsort(rows["start"][mine], kind="stable")]
        moves = [[start, end, "T", _transfer(trace, index), 0] for start, end, index in zip(
            rows["start"][mine].tolist(), rows["end"][mine].tolist(), rows["transfer"][mine].tolist(), strict=True)
            if end > start]
        if moves:
            lanes.append({"name": f"stage {device}, links", "thin": True, "ops": moves[:4 * longest]})
    return {"name": name, "seconds": trace.seconds, "lanes": lanes}


def _transfer(trace: Trace, index: int) -> str:
    one = trace.table[index]
    return f"{one.axis} {one.collective.replace('_', '-')}"


def memory(trace: Trace, limit: float) -> Figure:
    """Bytes that some stages hold over the step, and what a device has."""
    data = []
    for number, device in enumerate(some_stages(trace.schedule.devices, 5), start=1):
        seconds, held = trace.memory(device)
        order = np.argsort(seconds, kind="stable")
        keep = _thinned(len(order), 1500)
        data.append({
            "type": "scatter", "mode": "lines", "name": f"stage {device}", "line": {"shape": "hv", "width": 1.8,
            "color": series(number)}, "x": seconds[order][keep], "y": held[order][keep] / GB,
            "hovertemplate": f"stage {device}: %{{y:.1f}} GB at %{{x:.3f}} s<extra></extra>"})
    layout = {"xaxis": {"title": {"text": "seconds of the step"}}, "showlegend": True,
              "yaxis": {"title": {"text": "GB a device"}, "rangemode": "tozero"},
              "shapes": [{"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": limit / GB, "y1": limit / GB,
                          "line": {"color": series(5), "width": 1.75, "dash": "dash"}}],
              "annotations": [{"x": 1, "xref": "paper", "xanchor": "right", "y": limit / GB, "yanchor": "bottom",
                               "text": f"{limit / GB:.0f} GB for the job", "showarrow": False,
                               "font": {"size": 12, "color": series(5)}}]}
    return Figure(data, layout, "Memory over time", height=360)


def _thinned(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def load_over_time(trace: Trace, levels: Sequence[str]) -> Figure:
    """How busy the links of each level are over the step, of the stage that uses them most."""
    data = []
    for number, level in enumerate(levels):
        share = trace.load_over_time(level, bins=160)
        if not share.any():
            continue
        busiest = share[int(share.sum(axis=1).argmax())]
        seconds = (np.arange(len(busiest)) + 0.5) * trace.seconds / len(busiest)
        data.append({"type": "scatter", "mode": "lines", "name": level, "x": seconds, "y": busiest, "line": {
            "width": 1.8, "color": series(1 + number % 6), "shape": "hv"},
            "hovertemplate": f"{level}: %{{y:.0%}} at %{{x:.3f}} s<extra></extra>"})
    layout = {"xaxis": {"title": {"text": "seconds of the step"}}, "showlegend": True,
              "yaxis": {"title": {"text": "share of the link"}, "tickformat": ".0%", "range": [0, 1.05]}}
    return Figure(data, layout, "Link load by level", height=360)


def load_bars(plans: Mapping[str, Plan], levels: Sequence[str]) -> Figure:
    """GB that a device sends at each level in a step, plan beside plan."""
    data = []
    for number, (name, plan) in enumerate(plans.items()):
        data.append({"type": "bar", "name": name, "x": list(levels), "marker": {"color": series(1 if number == 0
                                                                                                else 0)},
                     "y": [plan.traffic.get(level, 0.0) / GB for level in levels],
                     "customdata": [plan.load.get(level, 0.0) for level in levels],
                     "hovertemplate": f"{name}, %{{x}}: %{{y:.3g}} GB, link busy %{{customdata:.0%}}<extra></extra>"})
    layout = {"barmode": "group", "xaxis": {"type": "category"}, "showlegend": True,
              "yaxis": {"title": {"text": "GB a device and step"}, "type": "log", "dtick": 1}}
    return Figure(data, layout, "Bytes by level", height=340, wide=True)


def bubbles(plans: Mapping[str, Plan]) -> Figure:
    """Where the step goes: computing, and waiting by cause, plan over plan."""
    causes = list(dict.fromkeys(cause for plan in plans.values() for cause in plan.bubble))
    names = list(plans)
    data = [{"type": "bar", "orientation": "h", "name": "computing", "y": names, "marker": {"color": series(1)},
             "x": [plan.seconds - sum(plan.bubble.values()) for plan in plans.values()],
             "hovertemplate": "%{y}: computing %{x:.3f} s<extra></extra>"}]
    for number, cause in enumerate(causes):
        data.append({"type": "bar", "orientation": "h", "name": cause, "y": names,
                     "marker": {"color": series((2, 5, 4, 6)[number % 4])},
                     "x": [plan.bubble.get(cause, 0.0) for plan in plans.values()],
                     "hovertemplate": f"%{{y}}: {cause} %{{x:.3f}} s<extra></extra>"})
    layout = {"barmode": "stack", "xaxis": {"title": {"text": "seconds, mean over stages"}}, "showlegend": True,
              "legend": {"traceorder": "normal"},
              "yaxis": {"autorange": "reversed", "showgrid": False, "tickfont": {"color": "var(--ink)", "size": 13}}}
    return Figure(data, layout, "Where the step goes", height=130 + 40 * len(names), wide=True)


def scatter(plans: Sequence[Plan], marked: Mapping[str, Plan], outermost: str) -> Figure:
    """Step time against memory; how large a dot is says how much crosses the outermost level."""
    most = max((plan.traffic.get(outermost, 0.0) for plan in (*plans, *marked.values())), default=0.0) or 1.0

    def dots(name: str, some: Sequence[Plan], color: str, symbol: str) -> dict[str, Any]:
        return {
            "type": "scatter", "mode": "markers", "name": name, "x": [plan.seconds for plan in some],
            "y": [plan.peak_memory / GB for plan in some], "text": [plan.title for plan in some],
            "customdata": [[plan.traffic.get(outermost, 0.0) / GB, plan.mfu] for plan in some],
            "marker": {"color": color, "symbol": symbol, "opacity": 0.85, "line": {"width": 1, "color": "var(--paper)"},
                       "size": [8 + 16 * (plan.traffic.get(outermost, 0.0) / most) ** 0.5 for plan in some]},
            "hovertemplate": "%{text}<br>%{x:.3f} s, %{y:.1f} GB, MFU %{customdata[1]:.1%}<br>"
                             f"%{{customdata[0]:.3g}} GB a device across {outermost}<extra>{name}</extra>"}

    data = [dots("searched", plans[1:], series(0), "circle")] if len(plans) > 1 else []
    front = pareto(plans)
    data.append({"type": "scatter", "mode": "lines", "name": "best of both", "hoverinfo": "skip",
                 "x": [plan.seconds for plan in front], "y": [plan.peak_memory / GB for plan in front],
                 "line": {"color": series(1), "width": 1.5, "dash": "dot"}})
    data.append(dots("winner", plans[:1], series(1), "star"))
    symbols = ("diamond", "square", "triangle-up", "cross", "x", "hexagon")
    for number, (name, plan) in enumerate(marked.items()):
        data.append(dots(name, [plan], series((2 + number) % 7), symbols[number % len(symbols)]))
    layout = {"xaxis": {"title": {"text": "seconds a step"}}, "showlegend": True,
              "yaxis": {"title": {"text": "GB a device, at the peak"}, "rangemode": "tozero"}}
    return Figure(data, layout, f"Step time, memory, and bytes across {outermost} (size)", height=430, wide=True)


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Those that no other beats in both time and memory, fastest first."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda one: (one.seconds, one.peak_memory)):
        if not front or plan.peak_memory < front[-1].peak_memory:
            front.append(plan)
    return front


def gains(rows: Sequence[tuple[str, float, str]], caption: str) -> Figure:
    """Horizontal bars: (what is made 10 % better, share of the step that it saves, remark)."""
    names = [name for name, _, _ in rows]
    top = max((gain for _, gain, _ in rows), default=0.0) or 0.01
    data = [{"type": "bar", "orientation": "h", "y": names, "x": [gain for _, gain, _ in rows], "customdata": [
        note for *_, note in rows], "text": [f"{gain:.2%}" for _, gain, _ in rows], "textposition": "outside",
        "cliponaxis": False, "textfont": {"color": "var(--ink)", "size": 12.5}, "marker": {"color": [
            series(2 if note else 1) for *_, note in rows]},
        "hovertemplate": "%{y}: %{x:.2%}<br>%{customdata}<extra></extra>"}]
    layout = {"xaxis": {"title": {"text": "share of the step saved"}, "tickformat": ".1%", "nticks": 6,
                        "range": [0, top * 1.2]}, "showlegend": False,
              "yaxis": {"autorange": "reversed", "showgrid": False, "tickfont": {"color": "var(--ink)", "size": 12.5}}}
    return Figure(data, layout, caption, height=110 + 30 * len(names), wide=True)


def flip_map(distances: Sequence[float], ratios: Sequence[float], winners: Sequence[Sequence[str]],
             gains_over: Sequence[Sequence[float]], texts: Sequence[Sequence[str]]) -> Figure:
    """Which axis crosses the outermost level in the best plan, over distance (columns) and oversubscription (rows)."""
    names = sorted({name for row in winners for name in row})
    colors = [series(1 + number % 6) for number in range(len(names))]
    z = [[names.index(name) for name in row] for row in winners]
    edges = [[at / len(names) + end / len(names), color] for at, color in enumerate(colors) for end in (0, 1)]
    labels = [[f"{gain:+.0%}" if abs(gain) >= 0.005 else "0 %" for gain in row] for row in gains_over]
    data = [{
        "type": "heatmap", "x": [_kilometres(one) for one in distances], "y": [f"1:{ratio:g}" for ratio in ratios],
        "z": z,
        "zmin": -0.5, "zmax": len(names) - 0.5, "colorscale": edges, "text": labels, "texttemplate": "%{text}",
        "textfont": {"color": "var(--paper)", "size": 12}, "customdata": texts, "xgap": 3, "ygap": 3,
        "showscale": False,
        "hovertemplate": "%{x}, %{y}<br>%{customdata}<extra></extra>"}]
    data += [{"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "hoverinfo": "skip",
              "marker": {"symbol": "square", "size": 12, "color": color}}
             for name, color in zip(names, colors, strict=True)]
    layout = {"xaxis": {"title": {"text": "distance"}, "type": "category", "showgrid": False},
              "yaxis": {"title": {"text": "oversubscription"}, "type": "category", "showgrid": False},
              "showlegend": True}
    return Figure(data, layout, "What crosses the outermost level in the best plan; how much faster than production",
                  height=120 + 52 * len(ratios), wide=True)


def _kilometres(metres: float) -> str:
    return f"{metres / 1e3:,.0f} km" if metres >= 1e3 else f"{metres:.0f} m"
