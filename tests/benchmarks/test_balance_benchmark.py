"""The benchmark of partitions, small: every contender is judged, and real processes exchange what they should."""

import pytest

from benchmarks import balance


@pytest.mark.parametrize("capped", [False, True])
def test_every_contender_is_judged(capped, capsys):
    rows = {row["partition"]: row for row in balance.partitions(16, capped, 2, quick=not capped)}
    assert rows["unbalanced"]["moved_tokens"] == 0 and rows["unbalanced"]["idle_cost"] > 0.1
    for name in ("zigzag", "karmarkar_karp", "lpt", "equal_count", "equal_cost"):
        assert rows[name]["idle_cost"] < 0.02 < rows["unbalanced"]["idle_cost"], name
        assert rows[name]["idle_error"] < 0.1 and rows[name]["own_ms"] > 0
    if not capped:
        assert rows["rebalance"]["moved_tokens"] < 0.2 < rows["equal_count"]["moved_tokens"]
        assert rows["segments, cost"]["padding"] < 0.5 * rows["equal_count"]["padding"]
    balance.show_partitions(list(rows.values()))
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_what_was_asked_is_held_against_figures():
    result = {"partitions": {key: balance.partitions(16, "capped" in key, 1, quick=True)
                             for key in ("64", "64 capped", "256", "256 capped")}}
    lines = {what: met for what, _, _, met in balance.asked(result)}
    assert lines["the same, equal_count, worst batch"]
    result["partitions"]["64"][0]["idle_cost"] = 0.5
    assert not {what: met for what, _, _, met in balance.asked(result)}["idle by cost, 64 ranks, unbalanced"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_are_measured_and_processes_run():
    from benchmarks import balance_steps

    found = balance_steps.measured(8, 8, 2)
    rows = {row["partition"]: row for row in found["rows"]}
    assert len(rows) == 3 + len(balance_steps.WRONG)
    lines = {what: reached for what, _, reached, _ in balance.asked({"measured": found})}
    middle = sorted(rows[name]["idle_time"] for name in balance_steps.WRONG)[1]
    assert any("median draw" in what and f"{100 * middle:.2f} %;" in reached for what, reached in lines.items())
    assert rows[balance_steps.CAPPED]["idle_time"] < rows[balance_steps.UNBALANCED]["idle_time"]
    assert rows[balance_steps.CLOCK]["idle_time"] <= rows[balance_steps.CLOCK]["idle_once_high"]
    (row,) = balance_steps.processes(quick=True)
    assert row["rounds"] == 2 and row["unbalanced_ms"] > 0 and row["balanced_ms"] > 0
