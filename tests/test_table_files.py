"""Tables in files as streams: which files, in which order, in which pieces."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.table_files import digest, file_schema, find_files, in_pieces, read_batches


def test_files_are_sorted_within_a_folder_and_kept_in_the_order_given(tmp_path):
    for name in ("b/2.csv", "b/10.csv", "a/x.parquet", "a/.x.csv", "a/_x.csv", "_tmp/y.csv", "notes.md", "A.CSV"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")
    found = find_files([tmp_path / "b" / "2.csv", tmp_path])
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "b/2.csv", "A.CSV", "a/x.parquet", "b/10.csv", "b/2.csv"]
    with pytest.raises(ValueError, match=r"notes\.md: expected a name that ends in \.parquet"):
        find_files([tmp_path / "notes.md"])
    with pytest.raises(FileNotFoundError):
        find_files([tmp_path / "none"])


def test_batches_are_no_larger_than_asked_for(tmp_path):
    table = pa.table({"a": list(range(10)), "b": [str(n) for n in range(10)]})
    pq.write_table(table, tmp_path / "t.parquet")
    with pa.ipc.new_stream(str(tmp_path / "t.arrow"), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "t.csv").write_text("a,b\n" + "".join(f"{n},{n}\n" for n in range(10)))
    for path in sorted(tmp_path.iterdir()):
        parts = list(read_batches(path, ["b"], 4))
        assert max(part.num_rows for part in parts) <= 4, path
        assert pa.concat_tables(parts).to_pydict() == {"b": [str(n) for n in range(10)]}, path
        assert file_schema(path).names == ["a", "b"]
    assert len({digest(path) for path in tmp_path.iterdir()}) == 3


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 5))
def test_pieces_do_not_depend_on_how_they_came(sizes, rows):
    total = sum(sizes)
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    parts = [pa.table({"a": pa.array(range(low, low + size), pa.int64())})
             for low, size in zip(starts, sizes, strict=True)]
    pieces = [piece["a"].to_pylist() for piece in in_pieces(parts, rows)]
    assert pieces == [list(range(low, min(low + rows, total))) for low in range(0, total, rows)]
