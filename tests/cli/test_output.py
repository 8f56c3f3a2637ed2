"""What the verbs print."""

import json

import numpy as np
import pytest

from semel.cli import output


def test_json_has_plain_numbers_and_null_for_nan(capsys):
    document = {"a": np.float32(0.5), "b": np.arange(2), "c": float("nan"), "d": {"e": np.bool_(True)}, "f": "é"}
    output.print_json(document)
    text = capsys.readouterr().out
    assert json.loads(text) == {"a": 0.5, "b": [0, 1], "c": None, "d": {"e": True}, "f": "é"}
    assert "é" in text


@pytest.mark.parametrize(("number", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.2 kB"), (34e6, "34.0 MB"),
                                              (123e6, "123 MB"), (1.6e9, "1.6 GB"), (5e15, "5000.0 TB")])
def test_sizes_for_people(number, text):
    assert output.size(number) == text
