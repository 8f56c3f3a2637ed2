"""A server at twice its capacity: what it answers, how fast, and what it refuses.

    python -m benchmarks.overload [--small] [--seconds 10] [--workers 1] [--json overload.json]

1. *Unloaded*: one client that asks, waits for the answer, and asks again: its p99.
2. *Capacity*: eight clients that do so: answers a second.
3. *Overload*: an open loop in a process of its own sends at twice the capacity, at random times (Poisson), whether
   answers come or not; a latency is counted from the moment at which the request was due. The server's
   ``--latency-target`` is twice the unloaded p99, which is what somebody would ask for who wants to stay within three
   times of it. ``inside`` is what the server says of itself, from admission on; the rest is HTTP, the wait for a core
   and the load's own delay. Beside it, in the same run, the same server with the bounded queue alone (64 may wait).

Work: an untrained HSTU ranker (2 layers, width 64), 500 candidates, histories of 1,024 events; ``--small``: 200 and
200. Everything runs on one machine, so the load takes time from the server, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.command import run_and_show
from benchmarks.serving import ITEMS, USERS, make_store, save_ranker

FACTOR = 2.0
OPEN = 3600.0
"""A latency target that nothing misses."""


@contextmanager
def serving(run: Path, store: Path, target: float, workers: int) -> Iterator[str]:
    """A server in processes of its own; yields its address."""
    code = ("import sys; from semel.serving import run_server; run_server(sys.argv[1], sys.argv[2], port=0, "
            "latency_target=float(sys.argv[3]), workers=int(sys.argv[4]), ready=lambda url: print(url, flush=True))")
    server = subprocess.Popen([sys.executable, "-c", code, str(run), str(store), str(target), str(workers)],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        if not url:
            raise RuntimeError("the server did not start; its message is above")
        yield url
    finally:
        os.kill(server.pid, signal.SIGTERM)
        server.wait(timeout=90)


def load(url: str, candidates: int, seconds: float, clients: int = 0, rate: float = 0.0) -> dict[str, Any]:
    """What a process of its own measures: a closed loop of ``clients``, or an open one of ``rate`` requests/s."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.overload", "--load", url, str(candidates), str(seconds),
                           str(clients), str(rate)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


class Connections:
    """Kept-open HTTP connections to one address, as many as are needed at a time."""

    def __init__(self, url: str):
        address = urlsplit(url)
        self._address = address.hostname, address.port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, request: bytes) -> tuple[int, float]:
        """The status of the answer (0 where the connection broke), and the milliseconds that the server says it took
        from admission on."""
        try:
            reader, writer = self._free.pop() if self._free else await asyncio.open_connection(*self._address)
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n")
                          if line.lower().startswith(b"content-length:"))
            body = await reader.readexactly(length)
            if b"connection: close" in head.lower():
                writer.close()
            else:
                self._free.append((reader, writer))
            total = body.rpartition(b'"total":')[2].partition(b"}")[0]
            return int(head.split(b" ", 2)[1]), float(total) if b'"total":' in body else 0.0
        except (OSError, asyncio.IncompleteReadError):
            return 0, 0.0


def bodies(candidates: int) -> list[bytes]:
    rng = np.random.default_rng(1)
    out = []
    for _ in range(200):
        body = json.dumps({"user_id": int(rng.integers(0, USERS)), "limit": 20,
                           "candidates": rng.permutation(ITEMS)[:candidates].tolist()}).encode()
        out.append(b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                   b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    return out


async def generate(url: str, candidates: int, seconds: float, clients: int, rate: float) -> dict[str, Any]:
    connections, asked = Connections(url), bodies(candidates)
    answers: list[tuple[int, float]] = []
    inside: list[float] = []

    async def ask(number: int, due: float) -> None:
        status, took = await connections.post(asked[number % len(asked)])
        answers.append((status, time.perf_counter() - due))
        if status == 200:
            inside.append(took)

    started = time.perf_counter()
    end = started + seconds
    if clients:
        async def client(number: int) -> None:
            while time.perf_counter() < end:
                await ask(number, time.perf_counter())
                number += clients

        await asyncio.gather(*(client(number) for number in range(clients)))
    else:
        rng, due, tasks = np.random.default_rng(2), started, []
        while (due := due + rng.exponential(1 / rate)) < end:
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(ask(len(tasks), due)))
        await asyncio.gather(*tasks)
    took = time.perf_counter() - started
    times = {kind: [1e3 * each for status, each in answers if (status == 200) == kind] for kind in (True, False)}
    return {"statuses": dict(sorted(Counter(str(status) for status, _ in answers).items())),
            "sent_per_s": len(answers) / took, "answered_per_s": len(times[True]) / took,
            "p50_ms": quantile(times[True], 0.5), "p99_ms": quantile(times[True], 0.99),
            "inside_p99_ms": quantile(inside, 0.99), "refused_p99_ms": quantile(times[False], 0.99)}


def quantile(values: list[float], q: float) -> float | None:
    return float(np.quantile(values, q)) if values else None


def measure(folder: Path, candidates: int, history: int, seconds: float, workers: int) -> dict[str, Any]:
    run, store = folder / "run", folder / "store"
    make_store(store, history)
    save_ranker(run, history)
    with serving(run, store, OPEN, workers) as url:
        load(url, candidates, min(2.0, seconds), clients=1)  # until everything is warm
        unloaded = load(url, candidates, seconds, clients=1)
        capacity = load(url, candidates, seconds, clients=8)
        rate = 2 * capacity["answered_per_s"]
        queue_only = load(url, candidates, seconds, rate=rate)
    target = FACTOR * unloaded["p99_ms"] / 1e3
    with serving(run, store, target, workers) as url:
        load(url, candidates, min(2.0, seconds), clients=1)
        overload = load(url, candidates, seconds, rate=rate)
        after = load(url, candidates, min(2.0, seconds), clients=1)
    return {"candidates": candidates, "history": history, "seconds": seconds, "workers": workers,
            "cores": os.cpu_count(), "target_ms": 1e3 * target, "unloaded": unloaded, "capacity": capacity,
            "queue_only": queue_only, "overload": overload, "after": after,
            "p99_ratio": overload["p99_ms"] / unloaded["p99_ms"],
            "queue_only_p99_ratio": queue_only["p99_ms"] / unloaded["p99_ms"],
            "errors": sum(count for status, count in overload["statuses"].items() if status not in ("200", "503"))}


def show(result: dict[str, Any]) -> None:
    print(f"{result['candidates']} candidates, history {result['history']}, {result['workers']} worker(s), "
          f"{result['cores']} cores, target {result['target_ms']:.0f} ms")
    print(f"{'':24}{'sent/s':>9}{'answered/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'inside p99':>12}{'503 p99':>9}  statuses")
    for name, label in (("unloaded", "unloaded (1 client)"), ("capacity", "capacity (8 clients)"),
                        ("queue_only", "2x, queue of 64 alone"), ("overload", "2x, latency target"),
                        ("after", "afterwards (1 client)")):
        row = result[name]
        columns = (("sent_per_s", 9), ("answered_per_s", 12), ("p50_ms", 9), ("p99_ms", 9), ("inside_p99_ms", 12),
                   ("refused_p99_ms", 9))
        numbers = "".join(f"{'-' if row[key] is None else format(row[key], '.1f'):>{width}}" for key, width in columns)
        print(f"{label:24}{numbers}  {row['statuses']}")
    print(f"p99 of what was accepted at 2x / unloaded p99: {result['p99_ratio']:.2f} (must be <= 3); "
          f"with the queue alone {result['queue_only_p99_ratio']:.1f}; errors but 503: {result['errors']} (must be 0)")


def main() -> None:
    if sys.argv[1:2] == ["--load"]:
        url, candidates, seconds, clients, rate = sys.argv[2:]
        print(json.dumps(asyncio.run(generate(url, int(candidates), float(seconds), int(clients), float(rate)))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="less work, under a minute")
    parser.add_argument("--seconds", type=float, help="of each measurement (10; small: 3)")
    parser.add_argument("--workers", type=int, default=1, help="processes of the server")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    options = parser.parse_args()
    candidates, history, seconds = (200, 200, 3.0) if options.small else (500, 1024, 10.0)

    def run(folder: Path) -> dict[str, Any]:
        return measure(folder, candidates, history, options.seconds or seconds, options.workers)

    def shown(result: dict[str, Any]) -> None:
        show(result)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))

    run_and_show(run, shown, as_json=False)


if __name__ == "__main__":
    main()
