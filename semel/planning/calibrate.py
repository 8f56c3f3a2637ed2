"""Efficiency curves of a device from a measured table or a profiler's trace, and its one number from step times."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from semel.planning.cluster import Cluster, Device
from semel.planning.compute import harmonic, peak
from semel.planning.curves import Curve
from semel.planning.units import BYTES, text
from semel.planning.validate import Measurement, predicted, with_reached

KINDS = {"matmul": ("m", "n", "k"), "attention": ("sequence", "flops"), "elementwise": ("bytes",),
         "collective": ("bytes", "ranks")}
"""Kinds of rows of a measured table, and their columns beside ``kind``, ``seconds`` and, if not bf16, ``dtype``."""


FASTEST = 1.1
"""Times a link's bandwidth that a measured collective may seem to reach: clocks are not exact."""


@dataclass(frozen=True)
class Sample:
    """One measured operation. ``sizes`` are the columns of its kind, ``seconds`` how long it took."""

    kind: str
    sizes: tuple[float, ...]
    seconds: float
    dtype: str = "bf16"


def read_table(path: str | Path) -> list[Sample]:
    """A CSV file with a header; see ``KINDS``. ValueError names the line of a mistake."""
    found = []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or "kind" not in reader.fieldnames or "seconds" not in reader.fieldnames:
            raise ValueError(f"{path}: the first line must name the columns, kind and seconds among them")
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            kind = (row["kind"] or "").strip()
            if kind not in KINDS:
                raise ValueError(f"{where}: unknown kind {kind!r}; there are: {', '.join(KINDS)}")
            try:
                sizes = tuple(float(row[name]) for name in KINDS[kind])
                seconds = float(row["seconds"])
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{where}: a {kind} row needs numbers in {', '.join(KINDS[kind])}, seconds") from None
            if not seconds > 0 or min(sizes) <= 0:
                raise ValueError(f"{where}: sizes and seconds must be above 0")
            dtype = (row.get("dtype") or "bf16").strip()
            if dtype not in BYTES:
                raise ValueError(f"{where}: unknown dtype {dtype!r}; there are: {', '.join(BYTES)}")
            found.append(Sample(kind, sizes, seconds, dtype))
    if not found:
        raise ValueError(f"{path}: no rows")
    return found


_DTYPES = {"c10::bfloat16": "bf16", "bfloat16": "bf16", "c10::half": "fp16", "half": "fp16", "float": "fp32",
           "double": "fp64", "c10::float8_e4m3fn": "fp8"}
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
_ELEMENTWISE = ("aten::add", "aten::mul", "aten::silu", "aten::gelu", "aten::copy_", "aten::native_layer_norm")


def read_trace(path: str | Path) -> list[Sample]:
    """Matrix products, element-wise operations and collectives of a torch profiler's Chrome trace (``.json`` or
    ``.json.gz``), recorded with ``record_shapes=True``.

    An operation's time is that of the device kernels with its ``External id``; without any, its own on the CPU.
    ValueError for a file that is none, or has no shapes.
    """
    try:
        raw = Path(path).read_bytes()
        trace = json.loads(gzip.decompress(raw) if str(path).endswith(".gz") else raw)
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
    except (OSError, EOFError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a Chrome trace: {error}") from None
    kernels: dict[int, float] = {}
    for event in events:
        if isinstance(event, dict) and event.get("cat") in ("kernel", "gpu_memcpy"):
            key = event.get("args", {}).get("External id")
            if key is not None:
                kernels[key] = kernels.get(key, 0.0) + float(event.get("dur", 0.0)) * 1e-6
    found: list[Sample] = []
    for event in events:
        if isinstance(event, dict) and event.get("cat") == "cpu_op" and event.get("ph") == "X":
            sample = _sample(event, kernels)
            if sample is not None:
                found.append(sample)
    if not found:
        raise ValueError(f"{path}: no matrix products with shapes; record with profile(record_shapes=True)")
    return found


def _sample(event: dict[str, Any], kernels: dict[int, float]) -> Sample | None:
    args = event.get("args", {})
    seconds = kernels.get(args.get("External id", -1), 0.0) if kernels else float(event.get("dur", 0.0)) * 1e-6
    dims, types = args.get("Input Dims") or [], args.get("Input type") or []
    name = event.get("name", "")
    if name == "record_param_comms" and "Group size" in args:
        size = float(args.get("In msg nelems", 0)) * BYTES[_DTYPES.get(str(args.get("dtype", "")).lower(), "fp32")]
        ranks = float(args["Group size"])
        if args.get("Collective name") == "allreduce" and size > 0 and seconds > 0 and ranks > 1:
            return Sample("collective", (size, ranks), seconds)
        return None
    if seconds <= 0 or not dims:
        return None
    if name in _PRODUCTS:
        first = _PRODUCTS[name]
        if len(dims) < first + 2 or not dims[first] or not dims[first + 1]:
            return None
        left, right = dims[first], dims[first + 1]
        batch = float(left[0]) if len(left) == 3 else 1.0
        dtype = _DTYPES.get(str(types[first]).lower(), "fp32") if len(types) > first else "fp32"
        m, k, n = float(left[-2]), float(left[-1]), float(right[-1])
        return Sample("matmul", (m, n, k), seconds / batch, dtype) if min(m, n, k) > 0 else None
    if name in _ELEMENTWISE and dims[0]:
        dtype = _DTYPES.get(str(types[0]).lower(), "fp32") if types else "fp32"
        return Sample("elementwise", (2 * BYTES[dtype] * math.prod(dims[0]),), seconds, dtype)
    return None


def calibrated(device: Device, samples: Sequence[Sample]) -> Device:
    """The device with the curves that the samples give; what they do not speak of stays.

    Peaks of a dtype that it has none for are an error (KeyError). Curves have a point an octave: the median share of
    the samples there, and never fall as sizes grow (medians are pooled where they do).
    """
    matmul = [(harmonic(*s.sizes), 2 * math.prod(s.sizes) / s.seconds / peak(device, s.dtype))
              for s in samples if s.kind == "matmul"]
    attention = [(s.sizes[0], s.sizes[1] / s.seconds / peak(device, s.dtype)) for s in samples if s.kind == "attention"]
    moved = sorted(s.sizes[0] / s.seconds / device.memory_bandwidth for s in samples
                   if s.kind == "elementwise" and s.sizes[0] >= 2**22)  # smaller ones time the launch
    changed: dict[str, Any] = {}
    if matmul:
        changed["matmul"] = fit_curve(matmul)
        changed["reached"] = {}
    if attention:
        changed["attention"] = fit_curve(attention)
    if moved:
        changed["vector"] = min(1.0, moved[len(moved) // 2])
    return replace(device, **changed)


def level_toml(samples: Sequence[Sample], bandwidth: float, source: str) -> str:
    """The line ``messages`` for a level of a cluster file, by the samples' collectives over a link of ``bandwidth``
    bytes/s; ValueError without any."""
    return f"messages = {{ value = {_points(messages(samples, bandwidth))}, source = {json.dumps(source)} }}\n"


def messages(samples: Sequence[Sample], bandwidth: float) -> Curve:
    """Share of ``bandwidth`` that ring all-reduces reach over their size, 2 (n-1)/n b / seconds; ValueError without
    any, for one rank alone, and where they are faster than the link."""
    found = []
    for sample in samples:
        if sample.kind != "collective":
            continue
        size, ranks = sample.sizes
        if ranks < 2:
            raise ValueError(f"a collective of {ranks:g} ranks sends nothing; give those of 2 or more")
        found.append((size, 2 * (ranks - 1) / ranks * size / sample.seconds / bandwidth))
    if not found:
        raise ValueError("no collectives among the samples")
    size, most = max(found, key=lambda each: each[1])
    if most > FASTEST:
        raise ValueError(f"a collective of {size:g} bytes is {most:.2f} times as fast as a link of "
                         f"{text(bandwidth, 'bandwidth')} allows: is that the bandwidth of one device?")
    return fit_curve(found)


def fit_curve(points: Iterable[tuple[float, float]]) -> Curve:
    """Non-decreasing curve through (size, share) points: medians an octave, pooled where they fall (isotonic)."""
    octaves: dict[int, list[tuple[float, float]]] = {}
    for size, share in points:
        octaves.setdefault(round(math.log2(size)), []).append((size, share))
    blocks: list[list[float]] = []  # [weight, share, log sizes...]
    for octave in sorted(octaves):
        mine = octaves[octave]
        shares = sorted(share for _, share in mine)
        middle = (shares[(len(shares) - 1) // 2] + shares[len(shares) // 2]) / 2
        blocks.append([float(len(mine)), middle, sum(math.log(size) for size, _ in mine) / len(mine)])
        while len(blocks) > 1 and blocks[-2][1] > blocks[-1][1]:
            last = blocks.pop()
            weight = blocks[-1][0] + last[0]
            blocks[-1][1] = (blocks[-1][0] * blocks[-1][1] + last[0] * last[1]) / weight
            blocks[-1][0] = weight
            blocks[-1].extend(last[2:])
    found = [(math.exp(log), min(1.0, max(1e-4, block[1]))) for block in blocks for log in block[2:]]
    return Curve.of(found)


def fit_reached(rows: Sequence[Measurement], dtype: str = "bf16", least: float = 0.3, most: float = 1.5) -> float:
    """``Device.reached`` of ``dtype`` with the smallest mean absolute error of the rows (golden section, to 1e-4).

    Give it the rows that are for fitting only (``Measurement.fitted``). ValueError without rows.
    """
    if not rows:
        raise ValueError("nothing to fit: no rows")

    def loss(reached: float) -> float:
        clusters: dict[int, Cluster] = {}
        errors = []
        for row in rows:
            if id(row.cluster) not in clusters:
                clusters[id(row.cluster)] = with_reached(row.cluster, dtype, reached)
            errors.append(abs(predicted(replace(row, cluster=clusters[id(row.cluster)])).error))
        return sum(errors) / len(errors)

    return golden(loss, least, most)


def golden(loss: Callable[[float], float], low: float, high: float, tolerance: float = 1e-4) -> float:
    """Minimum of a function with one valley."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > tolerance:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = loss(right)
    return (low + high) / 2


def device_toml(device: Device, source: str, start: Device | None = None) -> str:
    """A device file with these values, for ``semel plan calibrate``. What is as in ``start`` is called assumed."""
    def noted(name: str, value: str) -> str:
        kept = start is not None and getattr(device, name) == getattr(start, name)
        why = f"assumed = {json.dumps(f'as {device.name}, not measured')}" if kept else f"source = {json.dumps(source)}"
        return f"{name} = {{ value = {value}, {why} }}"

    lines = [f"name = {json.dumps(device.name)}", f"description = {json.dumps(f'{device.name}, calibrated: {source}')}",
             f'memory = "{device.memory:.0f} B"', f'memory_bandwidth = "{device.memory_bandwidth:.6g} B/s"',
             noted("matmul", _points(device.matmul)), noted("attention", _points(device.attention)),
             noted("vector", f"{device.vector:.4f}"),
             f'kernel = "{device.kernel:.6g} s"', f'reserved = "{device.reserved:.0f} B"',
             f'power = "{device.power:g} W"', f'price = "{device.price:g} $/h"', "", "[peak]"]
    lines += [f'{dtype} = "{rate:.6g} flop/s"' for dtype, rate in device.peak.items()]
    lines += ["", "[reached]", *(f"{dtype} = {share:.4f}" for dtype, share in device.reached.items())]
    return "\n".join(lines) + "\n"


def _points(curve: Curve) -> str:
    return "[" + ", ".join(f"[{size:.6g}, {share:.4f}]" for size, share in curve.points) + "]"
