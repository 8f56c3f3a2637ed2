"""Amazon reviews: the 2014 and 2018 editions (JSON lines, ratings CSV without a header) and the 2023 one (JSON lines,
CSV with a header); plain or gzip. Ids are strings. An item is the ``parent_asin`` in 2023, the ``asin`` before.

Times have the resolution of a day up to 2018 (many ties: the file's order decides) and of a millisecond in 2023.
"""

from __future__ import annotations

import ast
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from semel.datasets.dataset import Tables, build_events, build_features
from semel.datasets.delimited import first_line, microseconds, read_delimited

KEYS_2014 = ("reviewerID", "asin", "overall", "unixReviewTime")
KEYS_2023 = ("user_id", "parent_asin", "rating", "timestamp")


def open_text(path: Path) -> Any:
    """A text file, gzip or not."""
    return gzip.open(path, "rt", encoding="utf8") if path.suffix == ".gz" else open(path, encoding="utf8")


def peek(path: Path) -> str:
    """The first line of a text file, gzip or not; empty where it cannot be read as text."""
    try:
        return first_line(path)
    except (OSError, EOFError, zlib.error):
        return ""


def keys_of(line: str) -> set[str]:
    """The keys of a JSON object; none where the line is no object."""
    try:
        value = json.loads(line)
    except ValueError:
        return set()
    return set(value) if isinstance(value, dict) else set()


def read_json_2014(path: Path) -> Tables:
    """``reviews_*_5.json[.gz]``: reviewerID, asin, overall, unixReviewTime (seconds)."""
    raw = _read_json(path, KEYS_2014)
    return _tables(raw, KEYS_2014, "s", path, 1)


def read_json_2023(path: Path) -> Tables:
    """``*.jsonl[.gz]`` of 2023: user_id, parent_asin, rating, timestamp (milliseconds)."""
    raw = _read_json(path, KEYS_2023)
    return _tables(raw, KEYS_2023, "ms", path, 1)


def read_csv_2014(path: Path) -> Tables:
    """``ratings_*.csv``, no header: user, item, rating, seconds. The 2018 edition writes the item first; which column
    holds the items is told by their ten characters."""
    types = {"first": pa.string(), "second": pa.string(), "rating": pa.float32(), "timestamp": pa.int64()}
    raw = read_delimited(path, types, names=list(types))
    ten = [pc.all(pc.equal(pc.utf8_length(raw[name]), 10)).as_py() for name in ("first", "second")]
    user, item = ("second", "first") if ten[0] and not ten[1] else ("first", "second")
    return _tables(raw, (user, item, "rating", "timestamp"), "s", path, 1)


def read_csv_2023(path: Path) -> Tables:
    """``*.csv[.gz]`` of 2023, with a header: user_id, parent_asin, rating, timestamp (milliseconds)."""
    types = dict(zip(KEYS_2023, (pa.string(), pa.string(), pa.float32(), pa.int64()), strict=True))
    return _tables(read_delimited(path, types), KEYS_2023, "ms", path, 2)


def _tables(raw: pa.Table, keys: tuple[str, ...], unit: str, path: Path, line: int) -> Tables:
    user, item, rating, time = keys
    events = build_events({"user_id": raw[user], "item_id": raw[item], "rating": raw[rating],
                           "event_time": microseconds(raw[time], unit, str(path), line)}, str(path), line)
    beside = sorted([*path.parent.glob("meta_*.json*"), *path.parent.glob("meta_*.jsonl*")])
    return Tables(events, _items(beside[0]) if beside else None)


def _read_json(path: Path, keys: tuple[str, ...]) -> pa.Table:
    schema = pa.schema(list(zip(keys, (pa.string(), pa.string(), pa.float32(), pa.int64()), strict=True)))
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        return pj.read_json(path, pj.ReadOptions(block_size=1 << 24), options)
    except pa.ArrowInvalid as error:
        raise ValueError(_explain(path, keys) or f"{path}: {str(error).splitlines()[0]}") from None


def _explain(path: Path, keys: tuple[str, ...]) -> str | None:
    """A slow second look at JSON lines that did not parse: which line it was."""
    kinds: tuple[tuple[type, ...], ...] = ((str,), (str,), (int, float), (int,))
    for number, line in _lines(path):
        try:
            value = json.loads(line)
        except ValueError as error:
            return f"{path}, line {number}: not JSON ({error})"
        for key, kind in zip(keys, kinds, strict=True):
            if not isinstance(value.get(key), kind):
                return f"{path}, line {number}: column {key!r} holds {value.get(key)!r}"
    return None


def _items(path: Path) -> pa.Table:
    """``meta_*.json[l][.gz]``: title, brand (store), categories joined by ``|``, price. The 2014 files hold Python
    literals rather than JSON."""
    ids, titles, brands, categories, prices = [], [], [], [], []
    for number, line in _lines(path):
        try:
            row = json.loads(line)
        except ValueError:
            try:
                row = ast.literal_eval(line)
            except (ValueError, SyntaxError):
                raise ValueError(f"{path}, line {number}: neither JSON nor a Python literal") from None
        ids.append(row.get("parent_asin") or row.get("asin"))
        titles.append(row.get("title"))
        brands.append(row.get("store") or row.get("brand"))
        categories.append("|".join(dict.fromkeys(_flat(row.get("categories") or row.get("category") or []))) or None)
        prices.append(_price(row.get("price")))
    return build_features("item_id", {
        "item_id": pa.array(ids, pa.string()), "title": pa.array(titles, pa.string()),
        "brand": pa.array(brands, pa.string()), "categories": pa.array(categories, pa.string()),
        "price": pa.array(prices, pa.float32())}, str(path))


def _flat(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [word for part in value for word in _flat(part)]


def _price(value: Any) -> float | None:
    try:
        return float(str(value).lstrip("$").replace(",", ""))
    except ValueError:
        return None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line
