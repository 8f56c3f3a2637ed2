"""One sample a second of a running loop: what each process says of itself and what follows from them together."""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semel.loop.config import LoopFolder
from semel.loop.figures import normalized


class Lines:
    """A file of JSON lines that grows: ``read()`` gives those that are new. A line without its end is left for later,
    and a file that became shorter is read anew."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0

    def read(self) -> list[dict[str, Any]]:
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return []
        if size < self._offset:
            self._offset = 0
        if size == self._offset:
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.startswith(b"{") and line.endswith(b"}")]


class Sampler:
    """``take(processes)``: the sample of now. ``run``: the folder of the run that is trained and served."""

    def __init__(self, folder: LoopFolder, run: Path) -> None:
        self._folder, self._run = folder, run
        self._metrics = Lines(run / "metrics.jsonl")
        self._joined = Lines(folder.path / "joined.jsonl")
        self._served: list[tuple[int, float, float]] = []  # after each file: labels, loss, positive ones, of all so far
        self._trained: dict[str, Any] = {}
        self._checkpoint = ""

    def take(self, processes: Mapping[str, Mapping[str, Any]], server: Mapping[str, float]) -> dict[str, Any]:
        """``server``: figures of its /metrics, empty where it does not answer."""
        folder = self._folder
        for line in self._joined.read():
            self._served.append((line["labelled"], line["loss"], line["positive"]))
        for line in self._metrics.read():
            if line.get("kind") == "train":
                self._trained = line
        now = time.time()
        driver, joiner = folder.read_status("driver"), folder.read_status("joiner")
        trained = self._trained
        served_same = served_at(self._served, trained.get("rows", 0))
        waiting = sum(1 for path in folder.rows.glob("*.parquet") if path.name > trained.get("file", ""))
        skew = None
        if served_same is not None and trained.get("ne") is not None:
            skew = served_same - trained["ne"]
        served, best = driver.get("served_ne"), driver.get("best_ne")
        return {
            "time": now,
            "requests": driver.get("answers", 0), "requests_per_s": driver.get("requests_per_s"),
            "p50_ms": driver.get("p50_ms"), "p99_ms": driver.get("p99_ms"), "behind_s": driver.get("behind_s"),
            "coverage": driver.get("coverage"), "stale_reads": driver.get("stale_reads", 0),
            "failed": driver.get("failed", {}), "duplicates": driver.get("duplicates", {}),
            "served_ne": served, "best_ne": best, "gap": None if served is None or best is None else served - best,
            "prequential_ne": trained.get("window_ne"), "prequential_ne_all": trained.get("ne"), "skew": skew,
            "trained_rows": trained.get("rows", 0), "trained_steps": trained.get("step", 0),
            "samples_per_s": trained.get("samples_per_s"),
            "event_visible_p99_ms": driver.get("event_visible_p99_ms"),
            "item_shown_p50_s": driver.get("item_shown_p50_s"), "item_shown_p99_s": driver.get("item_shown_p99_s"),
            "items_shown": driver.get("items_shown", 0), "items_unseen": driver.get("items_unseen", 0),
            "events_waiting": driver.get("events_waiting", 0), "outcomes_waiting": driver.get("outcomes_waiting", 0),
            "windows_open": joiner.get("pending", 0), "files_waiting": waiting, "rows": joiner.get("rows", 0),
            "outcomes": joiner.get("outcomes", {}),
            "watermark_age_s": now - joiner["watermark"] / 1e6 if joiner.get("watermark") else None,
            "model_version": driver.get("model_version", ""), "finished": driver.get("finished", False),
            "server": dict(server), "processes": {name: dict(facts) for name, facts in processes.items()},
        }


def served_at(served: Sequence[tuple[int, float, float]], rows: int) -> float | None:
    """NE of the served scores on the first ``rows`` labels, interpolated within the file that they end in: what the
    trainer's prequential NE over as many is compared with. None before there are any."""
    if not rows or not served or served[-1][0] < rows:
        return None
    place = bisect.bisect_left([labels for labels, *_ in served], rows)
    after, before = served[place], served[place - 1] if place else (0, 0.0, 0.0)
    share = (rows - before[0]) / (after[0] - before[0])
    loss, positive = (low + share * (high - low) for low, high in zip(before[1:], after[1:], strict=True))
    return normalized(loss, rows, positive)


SERVER_FIGURES = ("semel_rank_inside", "semel_exposures_pending", "semel_exposures_lost", "semel_state_hits",
                  "semel_state_misses", "semel_store_version", "semel_catalogue_version", "semel_ready")


def scrape(text: str) -> dict[str, float]:
    """The server's figures that a sample keeps, of its Prometheus text; ``refused``: answers 503 so far."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if one.name in SERVER_FIGURES:
                found[one.name.removeprefix("semel_")] = one.value
            elif one.name == "semel_responses_total" and one.labels.get("code") == "503":
                found["refused"] = found.get("refused", 0.0) + one.value
            elif one.name == "semel_responses_total" and one.labels.get("code") in ("500", "502", "504"):
                found["errors"] = found.get("errors", 0.0) + one.value
    return found
