"""The benchmark of isolated models: its forms cost what it says, and its rows compare like with like."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import isolated
from semel.models.reallocation import cost

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from model_batches import FEATURES, encoders, make_batch


@pytest.fixture
def data():
    batches = [make_batch([3, 0, 5, 9] * 5, [4, 2, 3, 6] * 5, seed=seed) for seed in range(4)]
    return isolated.Data("drawn", 2, FEATURES, encoders(), torch.randn(39, 8), batches[:3], batches[3:])


@pytest.mark.parametrize("kind", list(isolated.PAIRS))
def test_the_forms_cost_less_and_then_the_same(kind):
    forms = isolated.configurations(kind, FEATURES)
    plain, narrow, wide, both = (cost(form, FEATURES).amortized(isolated.MANY) for form in forms.values())
    assert narrow < 0.7 * plain and 0.95 * plain < wide <= plain and 0.95 * plain < both <= plain
    assert forms["both"].candidate_width > forms["widened"].candidate_width == 1
    assert forms["widened"].request_width > forms["both"].request_width > 1


def test_a_row_a_form_with_paired_differences(data):
    rows = isolated.compare("dcnv2", data, 2)
    assert [row["form"] for row in rows] == ["plain", "isolated", "widened", "both"]
    assert rows[0]["auc_minus_plain"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    for row in rows[1:]:
        for figure in ("auc", "ne"):
            gap = row[f"{figure}_minus_plain"]
            assert gap["value"] == pytest.approx(row[figure] - rows[0][figure], abs=1e-12)
            assert gap["low"] <= gap["value"] <= gap["high"]
    assert isolated.table(rows).count("\n") == 5


def test_the_interval_over_seeds_is_students():
    found = isolated.over_seeds([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found["value"] == 3.0
    assert found["high"] - 3.0 == pytest.approx(2.776 * 2.5 ** 0.5 / 5 ** 0.5)
