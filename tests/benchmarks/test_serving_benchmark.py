"""The benchmarks of the stages run, and what they print makes sense."""

from __future__ import annotations

import pytest

from benchmarks import serving_stages


@pytest.mark.timeout(180)
def test_retrieval_beside_one_product_and_a_topk(capsys):
    found = serving_stages.retrieval([5000], [100, 5000], rounds=2)
    serving_stages.show_retrieval(found)
    assert "5,000" in capsys.readouterr().out
    for row in found["rows"]:
        assert row["sets_equal"] == 1.0 and 0 < row["scan_p50"] <= row["retrieve_p50"] and row["ratio"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_swaps_under_load(capsys):
    found = serving_stages.swap(5.0, clients=3)
    serving_stages.show_swap(found)
    assert "must be 0" in capsys.readouterr().out
    assert found["quiet"]["failed"] == found["swapping"]["failed"] == 0
    assert found["swapping"]["swaps"] >= 2 <= found["swapping"]["versions"] and found["quiet"]["versions"] == 1
