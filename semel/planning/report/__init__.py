"""One self-contained interactive page of a search: ``write_report(explain(cluster, job), "plan.html")``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.planning.explain import Explained


def write_report(found: Explained, path: str | Path) -> Path:
    """Write the page and return where it is. FileNotFoundError if its folder is missing."""
    from semel.planning.report.page import write
    from semel.planning.report.sections import page

    return write(page(found), Path(path))
