"""The report: one file that loads nothing, with its text escaped and its plots in it."""

import json
import re

import numpy as np
import pytest

from semel.cli.report.figures import (
    Estimate,
    bars,
    buckets,
    curves,
    estimates,
    latency_histogram,
    length_histogram,
    reliability,
    spans,
    wilson,
)
from semel.cli.report.page import Card, Grid, Page, Section, render


def figures_of(html: str) -> list[dict]:
    return json.loads(re.search(r"^const FIGURES = (.*);$", html, re.M).group(1))


@pytest.fixture(scope="module")
def html() -> str:
    draw = np.random.default_rng(0)
    figures = [
        curves({"training": ([1, 2], [0.6, 0.5]), "</script><b>": ([1, 2], [0.7, float("nan")])}, "Loss", "epoch", "y"),
        length_histogram(draw.integers(1, 3000, 500), "Lengths", "events", {"the model reads 200": 200}),
        reliability([{"predicted": 0.2, "observed": 0.25, "count": 40}], "Reliability"),
        latency_histogram(draw.gamma(20, 1, 200), "Latency"),
        bars({"fat": 10.0, "thin": 1.0}, "Bytes", "bytes", ["10 B", "1 B"], "thin"),
        estimates([Estimate("a", 0.9, 0.8, 1.0), Estimate("b", 0.7)], "NE", "NE", "b"),
        spans({"computing": [("forward", 0.0, 2.0, False), ("input", 2.0, 1.0, True)], "read": [("read", 0.5, 1.0,
                                                                                                False)]}, "Steps"),
        buckets([Estimate("0", 0.9), Estimate("1+", 0.8, 0.7, 0.9)], "By length", "events", "NE"),
    ]
    return render(Page("A <title>", "subtitle & more", [Card("stored", "41×", "note")],
                       [Section("Learning & more", ["In <plain> words."], figures,
                                Grid(["model", "NE"], [["ours", "0.9"]], frozenset({0})))], {"data": "made up"}))


def test_loads_nothing_from_anywhere(html):
    page = html.split("<script>")[0] + html.split("</script>")[-1]
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)
    assert "@import" not in page and "url(" not in page
    assert html.count("<script>") == 2


def test_text_is_escaped(html):
    assert "A &lt;title&gt;" in html and "In &lt;plain&gt; words." in html
    assert "</script><b>" not in html


def test_every_figure_has_its_place_and_strict_json(html):
    found = figures_of(html)
    assert len(found) == 8
    assert all(f'id="plot-{number}"' in html for number in range(8))
    assert found[0]["data"][1]["y"][1] is None


def test_colours_are_variables_so_that_dark_works(html):
    assert "prefers-color-scheme: dark" in html
    for figure in figures_of(html):
        assert not re.search(r"#[0-9a-fA-F]{6}", json.dumps(figure))


def test_histogram_counts_every_nonempty_history():
    figure = length_histogram(np.array([0, 1, 1, 2, 7, 100, 65536]), "Lengths", "events")
    assert int(np.sum(figure.data[0]["y"])) == 6


def test_wilson_interval():
    low, high = wilson(np.array([0.5, 0.0]), np.array([100.0, 10.0]))
    assert low[0] == pytest.approx(0.4038, abs=1e-3) and high[0] == pytest.approx(0.5962, abs=1e-3)
    assert low[1] == 0 and high[1] == pytest.approx(0.2775, abs=1e-3)
