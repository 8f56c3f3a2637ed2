"""A predictor over a small store, with a model of three lines in place of a trained one."""

import pytest

from semel.examples import ExposureLog
from semel.serving.predictor import Predictor
from serving.stand_ins import make_store, seen_items, stand_in


@pytest.fixture
def predictor(tmp_path):
    """The stand-in model over the small store, logging its exposures."""
    store, catalogue = make_store(tmp_path / "store")
    log = ExposureLog(tmp_path / "store" / "exposures")
    with store, Predictor(stand_in(seen_items), store, catalogue, exposures=log, max_candidates=30) as made:
        yield made
