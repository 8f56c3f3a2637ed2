"""Fixtures shared by all tests."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():  # Triton reads this when it is imported, by whichever test is first
    os.environ.setdefault("TRITON_INTERPRET", "1")


MEMORY, ENOUGH = Path("/dev/shm"), 4 << 30


@pytest.hookimpl(tryfirst=True)  # before pytest decides where its folders are
def pytest_configure() -> None:
    """Folders of tests lie in memory where there is room: stores force each append to the disk, tests make thousands.

    Not on macOS, nor in containers with little of it; an explicit ``--basetemp`` or PYTEST_DEBUG_TEMPROOT decides.
    """
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.fixture(scope="session", autouse=True)
def cache_of_blocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Blocks that stores keep lie here, and not in the user's own cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("blocks")
        patch.setattr("semel.history.storage.local.cache_folder", lambda given: Path(given or folder))
        yield folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the small real data sets beside the checkout; tests that need it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "ml-latest-small" / "ratings.csv").exists():
        pytest.skip(f"the small real data sets are not at {folder}")
    return folder
