"""Numbers with units, as planning files write them: "400 Gbit/s", "80 GiB", "5 us", "989 Tflop/s"."""

from __future__ import annotations

import re

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


def _scaled(unit: str, factor: float, binary: bool = False) -> dict[str, float]:
    prefixes = {**_DECIMAL, **(_BINARY if binary else {})}
    return {prefix + unit: factor * scale for prefix, scale in prefixes.items()}


UNITS: dict[str, dict[str, float]] = {
    "bandwidth": {**_scaled("bit/s", 1 / 8), **_scaled("bps", 1 / 8), **_scaled("B/s", 1.0, binary=True)},
    "size": _scaled("B", 1.0, binary=True),
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0},
    "rate": {**_scaled("flop/s", 1.0), **_scaled("FLOP/s", 1.0), **_scaled("flops", 1.0), **_scaled("FLOPS", 1.0)},
    "distance": {"m": 1.0, "km": 1e3},
    "power": {"W": 1.0, "kW": 1e3, "MW": 1e6},
    "price": {"$/h": 1.0},
    "egress": {"$/GB": 1e-9, "$/GiB": 2.0**-30, "$/TB": 1e-12},
}
"""Kind -> unit -> how many of the base unit: bytes/s, bytes, seconds, FLOP/s, metres, watts, dollars an hour, dollars a
byte. A bit is an eighth of a byte."""

EXAMPLES = {"bandwidth": '"400 Gbit/s"', "size": '"80 GiB"', "time": '"5 us"', "rate": '"989 Tflop/s"',
            "distance": '"40 km"', "power": '"700 W"', "price": '"2.5 $/h"', "egress": '"0.02 $/GB"'}

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*")


def parse(value: object, kind: str, where: str = "value") -> float:
    """``value`` in the base unit of ``kind``.

    Raises ValueError for a number without a unit, an unknown unit, a negative number, or what is no number at all;
    ``where`` says in the message what was being read.
    """
    units = UNITS[kind]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{where}: expected a {kind} such as {EXAMPLES[kind]}, got {value!r}")
    match = _NUMBER.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{where}: {value!r} is no {kind}; write a number and a unit, such as {EXAMPLES[kind]}")
    number, unit = float(match.group(1).replace("_", "")), match.group(2)
    if number < 0:
        raise ValueError(f"{where}: {value!r} is negative")
    if not unit:
        raise ValueError(f"{where}: {value!r} has no unit; write a {kind} such as {EXAMPLES[kind]}")
    if unit not in units:
        near = [known for known in units if known.lower() == unit.lower()]
        hint = f"did you mean {near[0]!r}?" if near else f"a {kind} looks like {EXAMPLES[kind]}"
        raise ValueError(f"{where}: unknown unit {unit!r} in {value!r}; {hint}")
    return number * units[unit]


def text(value: float, kind: str) -> str:
    """``value`` of the base unit of ``kind`` with a readable unit: "50 GB/s", "80 GiB", "5 us"."""
    steps: dict[str, list[tuple[float, str]]] = {
        "bandwidth": [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")],
        "size": [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")],
        "time": [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")],
        "rate": [(1e15, "Pflop/s"), (1e12, "Tflop/s"), (1e9, "Gflop/s"), (1.0, "flop/s")],
        "distance": [(1e3, "km"), (1.0, "m")],
        "power": [(1e6, "MW"), (1e3, "kW"), (1.0, "W")],
        "price": [(1.0, "$/h")],
        "egress": [(1e-9, "$/GB")],
    }
    scale, unit = next((step for step in steps[kind] if abs(value) >= step[0]), steps[kind][-1])
    return f"{value / scale:.4g} {unit}"


BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5,
         "int4": 0.5}
"""Bytes of one number of a dtype."""
