"""What a record of a store's log says beside its events: which appends it holds, and their versions and tokens.

A record holds one append, or several that were committed together (``docs/formats/history.md``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class AppendedRows:
    """One append in a record: its version, how many of the record's rows are its own, its token."""

    version: int
    rows: int
    token: str | None


def describe(appends: Sequence[AppendedRows], dictionaries: dict[str, Any]) -> dict[str, Any]:
    """The record's JSON. ``appends`` have consecutive versions; their rows follow one another."""
    if len(appends) == 1:
        described: dict[str, Any] = {"version": appends[0].version}
        if appends[0].token is not None:
            described["token"] = appends[0].token
    else:
        described = {"first_version": appends[0].version, "rows": [append.rows for append in appends]}
        tokens = {str(i): append.token for i, append in enumerate(appends) if append.token is not None}
        if tokens:
            described["tokens"] = tokens
    if dictionaries:
        described["dictionaries"] = dictionaries
    return described


def appends_of(metadata: dict[str, Any], rows: int) -> list[AppendedRows]:
    """The appends of a record that holds ``rows`` events. Raises KeyError or ValueError for a JSON that is no such
    description."""
    if "version" in metadata:
        return [AppendedRows(metadata["version"], rows, metadata.get("token"))]
    first, counts, tokens = metadata["first_version"], metadata["rows"], metadata.get("tokens", {})
    if sum(counts) != rows or not counts:
        raise ValueError(f"appends of {counts} rows in a record of {rows}")
    return [AppendedRows(first + i, count, tokens.get(str(i))) for i, count in enumerate(counts)]


def span(metadata: dict[str, Any]) -> tuple[int, int]:
    """The first and the last version of any record. Raises KeyError, TypeError for a JSON that names none."""
    if "version" in metadata:
        return metadata["version"], metadata["version"]
    return metadata["first_version"], metadata["first_version"] + len(metadata["rows"]) - 1


def versions_of(appends: Sequence[AppendedRows]) -> np.ndarray:
    """[rows] int64, ascending: the version of each of the record's events."""
    versions = np.array([append.version for append in appends], np.int64)
    return np.repeat(versions, [append.rows for append in appends])
