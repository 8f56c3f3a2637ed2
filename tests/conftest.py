"""Fixtures shared by all tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the small real data sets beside the checkout; tests that need it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "ml-latest-small" / "ratings.csv").exists():
        pytest.skip(f"the small real data sets are not at {folder}")
    return folder
