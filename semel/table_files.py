"""Tables in files as streams of Arrow batches: Parquet, Arrow IPC (file or stream), CSV and TSV, gzipped or not.

What lies in a file may be larger than memory: only a batch of it is held at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

TEXT = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
ENDINGS = (".parquet", ".arrow", ".arrows", ".feather", ".ipc", *TEXT)
BATCH_ROWS = 100_000
_IPC_FILE = b"ARROW1"


def find_files(paths: Iterable[Path], endings: tuple[str, ...] = ENDINGS) -> list[Path]:
    """The files at ``paths`` in the order given; of a folder all in it and below whose names end so, sorted by path.
    Names that start with ``.`` or ``_`` are passed over. FileNotFoundError, or ValueError where a folder has none."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(endings)
                           and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts))
            if not below:
                raise ValueError(f"{path}: no file in it whose name ends in {', '.join(endings)}")
            found += below
        elif path.is_file():
            if not path.name.lower().endswith(endings):
                raise ValueError(f"{path}: expected a name that ends in {', '.join(endings)}")
            found.append(path)
        else:
            raise FileNotFoundError(f"{path}: no such file or folder")
    return found


def is_text(path: Path) -> bool:
    """Whether all values in it are text, so that types are read off the values."""
    return path.name.lower().endswith(TEXT)


def digest(path: Path) -> str:
    """What tells one file's bytes from another's: 32 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def file_schema(path: Path) -> pa.Schema:
    """Names and types of the columns (text: all strings), with the metadata that lies in the file. ValueError naming
    the file where it is empty, damaged or not what its name says, or where two columns have one name."""
    with _named(path):
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: the file is empty")
        if is_text(path):
            schema = pa.schema([(name, pa.string()) for name in _header(path)])
        elif path.name.lower().endswith(".parquet"):
            with pq.ParquetFile(path) as file:
                schema = file.schema_arrow
        else:
            with _ipc(path) as reader:
                schema = reader.schema
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: more than one column is called {twice[0]!r}; rename them")
    return schema


def read_batches(path: Path, columns: Sequence[str], rows: int = BATCH_ROWS) -> Iterator[pa.Table]:
    """The columns, in that order, as tables of at most ``rows`` rows. ValueError naming the file for damage."""
    with _named(path):
        if is_text(path):
            for batch in csv.open_csv(path, csv.ReadOptions(block_size=1 << 22), _parse(path), csv.ConvertOptions(
                    column_types=dict.fromkeys(_header(path), pa.string()), include_columns=list(columns),
                    null_values=[""], strings_can_be_null=True)):
                yield from _cut(pa.Table.from_batches([batch]), rows)
        elif path.name.lower().endswith(".parquet"):
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(rows, columns=list(columns)):
                    yield pa.Table.from_batches([batch]).select(list(columns))
        else:
            with _ipc(path) as reader:
                for batch in _ipc_batches(reader):
                    batch.validate(full=True)  # offsets in a damaged file may point anywhere
                    yield from _cut(pa.Table.from_batches([batch]).select(list(columns)), rows)


def in_pieces(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of exactly ``rows`` (the last one shorter), so that they do not depend on the reader."""
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        while table.num_rows:
            part = table.slice(0, rows - count)
            held.append(part)
            count += part.num_rows
            table = table.slice(part.num_rows)
            if count == rows:
                yield pa.concat_tables(held)
                held, count = [], 0
    if held:
        yield pa.concat_tables(held)


def _cut(table: pa.Table, rows: int) -> Iterator[pa.Table]:
    for low in range(0, table.num_rows, rows):
        yield table.slice(low, rows)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Around what reads a file: what Arrow says of it becomes one line that names it."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "Empty CSV file" in reason:
            reason = "the file is empty"
        raise ValueError(f"{path}: {reason}") from None


@contextmanager
def _ipc(path: Path) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
    with pa.OSFile(str(path)) as file:
        is_file = file.read(len(_IPC_FILE)) == _IPC_FILE
        file.seek(0)
        with pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file) as reader:
            yield reader


def _ipc_batches(reader: pa.RecordBatchFileReader | pa.RecordBatchStreamReader) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.RecordBatchFileReader):
        return (reader.get_batch(i) for i in range(reader.num_record_batches))
    return iter(reader)


def _parse(path: Path) -> csv.ParseOptions:
    tabs = path.name.lower().endswith((".tsv", ".tsv.gz"))
    return csv.ParseOptions(delimiter="\t" if tabs else ",", newlines_in_values=True)


def _header(path: Path) -> list[str]:
    with csv.open_csv(path, csv.ReadOptions(block_size=1 << 20), _parse(path)) as reader:
        return list(reader.schema.names)
