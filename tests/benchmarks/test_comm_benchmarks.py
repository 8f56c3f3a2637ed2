"""The benchmarks of re-indexing and of SM-free transport run, and say what they did not measure."""

import json
import sys

import pytest
import torch

from benchmarks import reindex, sm_free


def test_reindex_compares_equal_results(monkeypatch, capsys):
    monkeypatch.setattr(reindex, "RANKS", (2, 64))
    lines = reindex.measure(16, 2, 3, 0.01)
    assert [(line["ranks"], line["operation"]) for line in lines] == [
        (ranks, name) for ranks in (2, 64) for name in (*reindex.OPERATIONS, "together")]
    assert all(line["ratio"] > 0 and line["fused_us"][0] <= line["fused_us"][1] for line in lines)
    reindex.show(lines)
    assert "together" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_sm_free_says_that_it_measured_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["sm_free", "--json", str(tmp_path / "out.json")])
    sm_free.main()
    assert "not measured" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["measured"] is False
