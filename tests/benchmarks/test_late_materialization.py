"""The benchmark runs, at a size that says nothing about speed, and its contestants agree (it asserts that itself)."""

TINY = ["--users", "12", "--mean", "60", "--requests-per-user", "20", "--last", "32", "--longest", "64",
        "--batch", "48", "--seconds", "0.01"]


def test_it_prints_one_object_of_numbers(printed):
    result = printed("late_materialization", *TINY)
    assert result["requests"] == 240 and set(result["tenants"]) == {"short", "middle", "long"}
    speeds = result["loader"]
    assert speeds["full, no worker"]["speed"] == 1
    assert speeds["window, 1 worker"]["lookups_per_pointer"] < 1
    assert all(row["raw"] == 24 and row["parquet_zstd"] < 24 for row in result["pointer_bytes"].values())
    assert result["total_bytes"]["fat rows"] > 0
    for tenant in result["tenants"].values():
        assert tenant["read_rows"] < 1 and tenant["lookup_batch"] <= tenant["lookup_streaming"]
