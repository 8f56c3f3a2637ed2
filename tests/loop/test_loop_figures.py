"""Figures of a loop: entropies, quantiles, samples put together from what processes say."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.loop.config import LoopConfig, LoopFolder
from semel.loop.figures import Entropy, Recent, quantile
from semel.loop.publishing import Published
from semel.loop.sampling import Lines, Sampler, scrape, served_at
from semel.metrics import NormalizedEntropy

PAIRS = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.floats(0, 1)), min_size=1, max_size=60)


@given(pairs=PAIRS)
def test_entropy_is_the_metric(pairs):
    ours, whole = Entropy(most=10), NormalizedEntropy()
    for label, prediction in pairs:
        ours.add(label, prediction)
        whole.update(np.array([label]), np.array([prediction]))
    last = NormalizedEntropy().update(*map(np.array, zip(*pairs[-10:], strict=True)))
    for found, expected in ((ours.all, whole.ne), (ours.recent, last.ne)):
        if np.isfinite(expected):
            assert found == pytest.approx(expected, rel=1e-9)
        else:
            assert found is None


def test_quantiles_and_windows():
    assert quantile([], 0.5) is None
    assert quantile([3, 1, 2], 0.5) == 2 and quantile([3, 1, 2], 0.99) == 3 and quantile([1, 2], 0.0) == 1
    recent = Recent(seconds=10)
    for second in range(20):
        recent.add(second, second)
    assert recent.values(19.0) == list(range(9, 20))


def test_lines_of_a_file_that_grows(tmp_path):
    lines = Lines(tmp_path / "l")
    assert lines.read() == []
    (tmp_path / "l").write_text('{"a": 1}\n{"a": 2')
    assert lines.read() == [{"a": 1}]
    (tmp_path / "l").write_text('{"a": 1}\n{"a": 2}\n')
    assert lines.read() == [{"a": 2}] and lines.read() == []
    (tmp_path / "l").write_text('{"a": 9}\n')  # a run that forgot what came after its checkpoint
    assert lines.read() == [{"a": 9}]


def test_served_entropy_at_a_number_of_labels():
    random = np.random.default_rng(0)
    label, prediction = random.integers(0, 2, 60).astype(float), random.random(60)
    served, parts = [], NormalizedEntropy()
    for low in range(0, 60, 20):
        parts.update(label[low : low + 20], prediction[low : low + 20])
        loss = -(label * np.log(prediction) + (1 - label) * np.log1p(-prediction))[: low + 20].sum()
        served.append((low + 20, loss, label[: low + 20].sum()))
    assert served_at(served, 60) == pytest.approx(parts.ne, rel=1e-6)
    assert served_at(served, 20) < 10 and min(served_at(served, 20), served_at(served, 40)) <= served_at(served, 30)
    assert served_at(served, 61) is None and served_at([], 5) is None and served_at(served, 0) is None


def test_a_sample_of_what_processes_say_and_its_metrics(tmp_path):
    folder = LoopFolder(tmp_path / "loop")
    folder.settle(LoopConfig())
    run = tmp_path / "run"
    run.mkdir()
    sampler = Sampler(folder, run)
    processes = {"server": {"up": True, "restarts": 2, "hangs": 1, "pid": 1, "seconds": 3.0, "rss_mb": 7.0}}
    empty = sampler.take(processes, {})
    assert empty["requests"] == 0 and empty["gap"] is None and empty["skew"] is None
    folder.write_status("driver", {"answers": 12, "served_ne": 0.9, "best_ne": 0.7, "failed": {"rank: 503": 3}})
    (folder.path / "joined.jsonl").write_text(json.dumps({"labelled": 10, "loss": 6.0, "positive": 5.0}) + "\n")
    (run / "metrics.jsonl").write_text(json.dumps(
        {"kind": "train", "rows": 10, "ne": 0.8, "window_ne": 0.75, "file": "000-009.parquet", "step": 3}) + "\n")
    for name in ("000-009", "010-019"):
        (folder.rows / f"{name}.parquet").touch()
    sample = sampler.take(processes, {"ready": 1.0})
    assert sample["gap"] == pytest.approx(0.2) and sample["files_waiting"] == 1
    assert sample["skew"] == pytest.approx(6.0 / 10 / np.log(2) - 0.8)
    published = Published()
    try:
        import httpx

        published.update({**sample, "elapsed_s": 1.0})
        text = httpx.get(published.url, trust_env=False).text
    finally:
        published.close()
    assert "semel_loop_requests 12.0" in text and 'semel_loop_restarts{process="server"} 2.0' in text
    assert 'semel_loop_hangs{process="server"} 1.0' in text
    assert 'semel_loop_failed_attempts{why="rank: 503"} 3.0' in text and "semel_loop_p99_ms NaN" in text


def test_figures_of_the_server_are_read_from_its_own_metrics():
    from semel.serving.metrics import Metrics

    metrics = Metrics()
    metrics.responses.labels("rank", "503").inc(4)
    metrics.responses.labels("rank", "200").inc(9)
    metrics.watch("semel_ready", "1 if ready", lambda: 1.0)
    assert scrape(metrics.text().decode()) == {"refused": 4.0, "ready": 1.0}
