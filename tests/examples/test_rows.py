import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.batch import Jagged, Pointers, RequestRows
from semel.examples import concat_rows, read_rows, rows_from_table, rows_to_table


def make(n, text, seed, weighted=False):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, n)
    count = int(lengths.sum())
    users, items = rng.integers(0, 9, n), rng.integers(0, 9, count)
    if text:
        users = np.array([f"ü{u}" for u in users] or [], dtype=object)
        items = np.array([f"фильм {i}" for i in items], dtype=object)
    city = np.array([None if rng.random() < 0.3 else f"c{rng.integers(3)}" for _ in range(n)], dtype=object)
    mask = rng.random(count) < 0.5
    return RequestRows(
        np.array([f"r{seed}-{i}" for i in range(n)], dtype=object),
        Pointers(users, rng.integers(0, 100, n), rng.integers(0, 5, n)), rng.integers(0, 5, n),
        {"city": city, "hour": rng.random(n).astype(np.float32)},
        Jagged(items, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)),
        {"like": np.where(mask, rng.random(count), 0).astype(np.float32)}, {"like": mask},
        rng.random(count).astype(np.float32) if weighted else None,
    )


def assert_same(a, b):
    assert a.request_id.tolist() == b.request_id.tolist()
    for name in ("user_id", "as_of", "version"):
        assert getattr(a.pointers, name).tolist() == getattr(b.pointers, name).tolist()
    assert {n: v.tolist() for n, v in a.context.items()} == {n: v.tolist() for n, v in b.context.items()}
    assert a.candidates.values.tolist() == b.candidates.values.tolist()
    assert a.candidates.offsets.tolist() == b.candidates.offsets.tolist()
    for name in ("label", "label_mask"):
        one, other = getattr(a, name), getattr(b, name)
        assert {n: v.tolist() for n, v in one.items()} == {n: v.tolist() for n, v in other.items()}
    assert (a.weight is None) == (b.weight is None)
    assert a.weight is None or a.weight.tolist() == b.weight.tolist()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 12), text=st.booleans(), seed=st.integers(0, 99), weighted=st.booleans(),
       cut=st.integers(0, 12))
def test_rows_survive_the_table_and_slices_of_it(n, text, seed, weighted, cut):
    rows = make(n, text, seed, weighted)
    table = rows_to_table(rows)
    assert_same(rows_from_table(table), rows)
    cut = min(cut, n)
    assert_same(rows_from_table(table.slice(cut)), rows.select(np.arange(cut, n)))
    both = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    assert_same(rows_from_table(both), rows)
    assert_same(concat_rows([rows.select(np.arange(cut)), rows.select(np.arange(cut, n))]), rows)


def test_parquet_keeps_rows_and_their_size_is_that_of_pointers(tmp_path):
    rows = make(50, False, 1)
    pq.write_table(rows_to_table(rows), tmp_path / "train.parquet")
    assert_same(read_rows(tmp_path / "train.parquet"), rows)
    assert rows.pointers.nbytes == 24 * 50


def test_no_rows_at_all_and_columns_without_a_value_keep_their_types():
    rows = make(5, True, 4)
    rows.context["city"][:] = None
    for part in (rows, rows.select(np.empty(0, np.int64))):
        table = rows_to_table(part)
        assert table.schema.field("context.city").type == pa.string()
        assert table.schema.field("candidates").type == pa.list_(pa.string())
        assert_same(rows_from_table(table), part)
    with pytest.raises(ValueError, match="'city' mixes types"):
        rows.context["city"][:2] = ["x", 1]
        rows_to_table(rows)


def test_integers_with_nulls_stay_apart_from_numbers():
    rows = make(3, False, 2)
    table = rows_to_table(rows).append_column("context.age", pa.array([25, None, 0], pa.int32()))
    assert rows_from_table(table).context["age"].tolist() == [25, None, 0]


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no examples at"):
        read_rows(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(ValueError, match="not a Parquet file"):
        read_rows(tmp_path / "text.parquet")
    table = rows_to_table(make(3, False, 3))
    with pytest.raises(ValueError, match="no column as_of"):
        rows_from_table(table.drop_columns("as_of"))
    short = table.set_column(table.column_names.index("label.like"), "label.like",
                             pa.array([[1.0] * 9] * 3, pa.list_(pa.float32())))
    with pytest.raises(ValueError, match=r"label\.like"):
        rows_from_table(short)
