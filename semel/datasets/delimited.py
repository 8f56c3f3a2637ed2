"""Delimited text at pyarrow's speed, with errors that name the file, the line and the column."""

from __future__ import annotations

import difflib
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from semel.datasets.dataset import first_true

_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 0}
UNITS = tuple(_MICROSECONDS)
"""Units of time since 1970. Nanoseconds are cut to microseconds."""


def read_delimited(
    path: Path,
    types: Mapping[str, pa.DataType],
    *,
    delimiter: str = ",",
    names: Sequence[str] | None = None,
    quoted: bool = True,
    encoding: str = "utf8",
    optional: Sequence[str] = (),
) -> pa.Table:
    """The columns ``types`` of a text file with one row a line. ``names``: the columns where the file has no header.

    Empty fields are null. Columns in ``optional`` are left out where the file lacks them. Raises FileNotFoundError,
    and ValueError (file, line, column) for a missing column, a row of another width, a value that does not parse.
    """
    require_file(path)
    header = list(names) if names is not None else read_header(path, delimiter, encoding)
    quoted = quoted or (names is None and '"' in first_line(path, encoding))  # some tools quote all text
    skip = 0 if names is not None else 1
    present = [name for name in types if name in header]
    for name in types:
        if name not in header and name not in optional:
            raise ValueError(missing_column(str(path), name, header))
    try:
        return _read(path, {name: types[name] for name in present}, delimiter, header, skip, quoted, encoding)
    except pa.ArrowInvalid as error:
        raise ValueError(_explain(path, types, delimiter, header, skip, quoted, encoding, error)) from None


def read_header(path: Path, delimiter: str = ",", encoding: str = "utf8") -> list[str]:
    """The column names in a file's first line. ValueError for an empty file."""
    line = first_line(path, encoding)
    if not line:
        raise ValueError(f"{path}: the file is empty")
    return [name.strip().strip('"') for name in line.split(delimiter)]


def first_line(path: Path, encoding: str = "utf8") -> str:
    """A file's first line without its end and byte order mark, gzip or not (the first MiB of it where it is longer)."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        line = file.readline(1 << 20)
    return line.decode(encoding, errors="replace").lstrip("\ufeff").rstrip("\r\n")


def require_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")


def missing_column(where: str, name: str, header: Sequence[str]) -> str:
    """The line that says a column is not there, which are, and which one may have been meant."""
    near = difflib.get_close_matches(name, header, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{where}: no column {name!r}; it has {', '.join(map(repr, header)) or 'none'}{hint}"


def microseconds(column: Any, unit: str, where: str, first: int = 1) -> pa.ChunkedArray:
    """Numbers in ``unit`` (one of UNITS) -> int64 microseconds. Nulls stay; ValueError where they overflow."""
    if pa.types.is_floating(column.type):
        factor = float(_MICROSECONDS[unit]) or 1e-3
        column = pc.round(pc.multiply(column.cast(pa.float64()), factor))
        bad = first_true(pc.invert(pc.fill_null(pc.less(pc.abs(column), 9e18), True)))
        if bad is not None:
            raise ValueError(f"{where}, line {bad + first}: event time {column[bad].as_py()} us is no time")
        return column.cast(pa.int64())
    if unit == "ns":
        return pc.divide(column.cast(pa.int64()), 1_000)
    try:
        return pc.multiply_checked(column.cast(pa.int64()), _MICROSECONDS[unit])
    except pa.ArrowInvalid:
        raise ValueError(f"{where}: event times in {unit} overflow; is the unit right?") from None


def _read(path: Path, types: Mapping[str, pa.DataType], delimiter: str, header: list[str], skip: int,
          quoted: bool, encoding: str) -> pa.Table:
    return csv.read_csv(
        path,
        read_options=csv.ReadOptions(column_names=header, skip_rows=skip, encoding=encoding, block_size=1 << 22),
        parse_options=csv.ParseOptions(delimiter=delimiter, quote_char='"' if quoted else False,
                                       newlines_in_values=quoted),
        convert_options=csv.ConvertOptions(column_types=dict(types), include_columns=list(types), null_values=[""],
                                           strings_can_be_null=True, quoted_strings_can_be_null=True),
    )


def _explain(path: Path, types: Mapping[str, pa.DataType], delimiter: str, header: list[str], skip: int,
             quoted: bool, encoding: str, error: pa.ArrowInvalid) -> str:
    """A slow second look at a file that did not parse: which line and column it was."""
    reason = str(error).splitlines()[0]
    if "Empty CSV file" in reason:
        return f"{path}: the file is empty"
    present = {name: kind for name, kind in types.items() if name in header}
    try:
        text = _read(path, dict.fromkeys(present, pa.string()), delimiter, header, skip, quoted, encoding)
    except pa.ArrowInvalid as again:
        return f"{path}: {str(again).splitlines()[0]}"
    for name, kind in present.items():
        value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
        row = _first_unparsable(text[name], value_type)
        if row is not None:
            value = text[name][row].as_py()
            return f"{path}, line {row + skip + 1}: column {name!r} holds {value!r}, which is no {_word(kind)}"
    return f"{path}: {reason}"


def _first_unparsable(column: pa.ChunkedArray, kind: pa.DataType) -> int | None:
    def parses(low: int, high: int) -> bool:
        try:
            pc.utf8_trim_whitespace(column.slice(low, high - low)).cast(kind)
        except pa.ArrowInvalid:
            return False
        return True

    low, high = 0, len(column)
    if parses(low, high):
        return None
    while high - low > 1:  # the first half that fails holds the first bad row
        middle = (low + high) // 2
        low, high = (middle, high) if parses(low, middle) else (low, middle)
    return low


def _word(kind: pa.DataType) -> str:
    return "whole number" if pa.types.is_integer(kind) else "number" if pa.types.is_floating(kind) else str(kind)
