"""Ids as files write them -> int64 where that loses nothing, else strings."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def encoded(column: pa.ChunkedArray | pa.Array) -> pa.DictionaryArray:
    """The column as one dictionary array: its distinct values in order of appearance, and codes."""
    codes = pc.dictionary_encode(column)
    if isinstance(codes, pa.ChunkedArray):
        codes = codes.unify_dictionaries().combine_chunks()
    if isinstance(codes, pa.ChunkedArray):  # no chunk at all
        codes = pa.array([], codes.type)
    return codes


def compact_ids(column: pa.ChunkedArray | pa.Array, prefixed: bool = False) -> pa.Array:
    """Text ids -> int64 when every one is a number written plainly (``7``, not ``007``), else strings. Nulls stay null.
    ``prefixed``: a prefix that ends in ``_`` and that all have (``1m_7``) is not part of the number."""
    codes = encoded(column)
    values = numbers(codes.dictionary, prefixed)
    return (codes.dictionary if values is None else values).take(codes.indices)


def numbers(ids: pa.Array, prefixed: bool = False) -> pa.Array | None:
    """Distinct text ids as int64, or None where they are not all plain numbers."""
    ids = ids.drop_null()
    if len(ids) == 0:
        return None
    first = ids[0].as_py()
    prefix = first[: first.rfind("_") + 1] if prefixed else ""
    rest = pc.utf8_slice_codeunits(ids, len(prefix))
    plain = pc.and_(pc.starts_with(ids, prefix), pc.match_substring_regex(rest, r"^(0|-?[1-9][0-9]{0,17})$"))
    return rest.cast(pa.int64()) if pc.all(plain).as_py() else None
