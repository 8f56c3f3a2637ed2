"""MovieLens as RecBole's "atomic files" (``.inter``, ``.item``, ``.user``), the form in which two PyPI wheels carry it.

The ids of ``ml-1m`` there are ``1m_17`` for users and the title for items. Users become 17; items become the
1-based row of the title in the ``.item`` file: **not the publisher's ids**. ``ml-100k`` keeps the publisher's ids.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from semel.datasets.dataset import Tables, build_events, build_features, first_true
from semel.datasets.delimited import microseconds, read_delimited
from semel.datasets.ids import compact_ids, encoded, numbers
from semel.datasets.movielens import year_of

_TEXT = pa.dictionary(pa.int32(), pa.string())


def read_recbole(folder: Path) -> Tables:
    """The events of the ``.inter`` file in ``folder``, with ``.item`` and ``.user`` where they are there."""
    path = the_file(folder, ".inter")
    columns = {"user_id:token": _TEXT, "item_id:token": _TEXT, "rating:float": pa.float32(),
               "timestamp:float": pa.float64()}
    table = read_delimited(path, columns, delimiter="\t", quoted=False)
    item_path, user_path = path.with_suffix(".item"), path.with_suffix(".user")
    items = names = None
    if item_path.is_file():
        items, names = _items(item_path)
    columns = {"user_id": _recode(table["user_id:token"], "user_id", str(path)),
               "item_id": _recode(table["item_id:token"], "item_id", str(path), names),
               "event_time": microseconds(table["timestamp:float"], "s", str(path), 2),
               "rating": table["rating:float"]}
    users = _users(user_path) if user_path.is_file() else None
    notes = () if names is None else ("item ids are the rows of the titles in the .item file, not the publisher's ids",)
    return Tables(build_events(columns, str(path), 2), items, users, None, notes)


def the_file(folder: Path, ending: str) -> Path:
    """The one file of ``folder`` with that ending; ValueError where there are more, FileNotFoundError for none."""
    found = sorted(folder.glob(f"*{ending}"))
    if not found:
        raise FileNotFoundError(f"{folder}: no *{ending} file in it")
    if len(found) > 1:
        raise ValueError(f"{folder}: several {ending} files ({', '.join(p.name for p in found)}); keep one a folder")
    return found[0]


def _items(path: Path) -> tuple[pa.Table, pa.Array | None]:
    """The items table, and the ids by which the .inter file names its rows where these are no numbers."""
    columns = {"item_id:token": pa.string(), "movie_title:token": pa.string(), "movie_title:token_seq": pa.string(),
               "release_year:float": pa.string(), "release_year:token": pa.string(), "genre:token": pa.string(),
               "class:token_seq": pa.string()}
    raw = read_delimited(path, columns, delimiter="\t", quoted=False, optional=list(columns)[1:])
    have = raw.column_names

    def one_of(*names: str) -> pa.ChunkedArray:
        for name in names:
            if name in have:
                return raw[name]
        return pa.chunked_array([pa.nulls(raw.num_rows, pa.string())])

    genres = pc.replace_substring(one_of("genre:token", "class:token_seq"), " ", "|")
    ids = numbers(raw["item_id:token"].combine_chunks())
    names = None
    if ids is None:
        names = raw["item_id:token"].combine_chunks()
        ids = pa.array(range(1, raw.num_rows + 1), pa.int64())
    table = build_features("item_id", {
        "item_id": ids, "title": one_of("movie_title:token", "movie_title:token_seq"),
        "year": year_of(one_of("release_year:float", "release_year:token")), "genres": genres}, str(path), 2)
    return table, names


def _users(path: Path) -> pa.Table:
    names = ("user_id:token", "age:float", "age:token", "gender:token", "occupation:float", "occupation:token",
             "zip_code:token")
    raw = read_delimited(path, dict.fromkeys(names, pa.string()), delimiter="\t", quoted=False, optional=names[1:])
    columns = {name.split(":")[0]: raw[name] for name in raw.column_names}
    columns["user_id"] = _recode(columns["user_id"], "user_id", str(path))
    return build_features("user_id", columns, str(path), 2)


def _recode(column: pa.ChunkedArray, name: str, where: str, rows: pa.Array | None = None) -> pa.Array:
    """Text ids -> int64: their 1-based row among ``rows``, else their number (behind a common prefix such as ``1m_``);
    the text itself where they are neither."""
    codes = encoded(column)
    if rows is None:
        return compact_ids(codes, prefixed=True)
    found = pc.index_in(codes.dictionary, value_set=rows)
    missing = first_true(pc.is_null(found))
    if missing is not None:
        raise ValueError(f"{where}: {name} {codes.dictionary[missing].as_py()!r} is not in the .item file beside it")
    return pc.add(found.cast(pa.int64()), 1).take(codes.indices)

