"""The supervisor: starts the loop's processes, watches them, starts again what ends, and ends all.

It holds nothing that the loop needs: killed, the others go on, and the next one takes over from them.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from semel.loop.config import LoopConfig, LoopFolder
from semel.loop.preparing import Stopped, command, overrides, prepare
from semel.loop.process import Child, end_leftover
from semel.loop.publishing import Published
from semel.loop.retention import Broom, sweeping
from semel.loop.sampling import Sampler, scrape

FRESH_S = 5.0
"""A sign of life that is older is none."""
ALIVE = "alive"
"""What a trainer touches in its run (``semel.training.follow``, which imports torch)."""
NAMES = ("server", "joiner", "trainer", "driver")
SILENCE_S = {"server": 30.0, "joiner": 60.0, "driver": 60.0, "trainer": 120.0}
"""Without a sign of life for so long, a process that gave one before hangs. A trainer gives one a step: the first step
on a machine compiles."""
GIVE_UP_AFTER = 8
"""Ends in a row of a process that never came to life: starting it again does not help. One that did is tried for as
long as it takes: disks are emptied, too."""
STATE_MIB = 16
"""Of request states: the driver asks for one page of each request, so none is ever found again."""
SWEEP_EVERY_S = 30.0
LATENCY_TARGET_MS = 10_000
"""The driver's few askers wait for their answers, and would ask again what was refused: that only adds work."""
COMPACT_ROWS = 10_000
"""Events that the server's log holds: a few minutes' of a loop on one machine."""
LAST_KILL_S = 15.0
"""Before a loop's end nothing is killed any more, so that all have caught up."""


class Loop:
    """``Loop(config, folder).run(duration)``: the last sample, with what was killed and how long each took to be back.

    ``port``, ``metrics_port``: of the server and of this loop's own ``/metrics``, 0: a free one. ``chaos``: kill one
    process after the other, one in so many seconds, but none before the last is back. ``say``: gets a line for
    everything that a person should know.
    """

    def __init__(self, config: LoopConfig, folder: str | Path, *, port: int = 0, metrics_port: int = 0,
                 chaos: float | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        if chaos is not None and not 1 <= chaos < float("inf"):
            raise ValueError(f"chaos must be at least 1 second, got {chaos}")
        for name, value in (("port", port), ("metrics-port", metrics_port)):
            if not 0 <= value <= 65535:
                raise ValueError(f"--{name} must be between 0 and 65535, got {value}")
        self.folder = LoopFolder(folder)
        if not self.folder.settled:
            config.make_recipe(self.folder)  # what is wrong with it is said before anything is made
        self.config = config
        self._port, self._metrics_port, self._chaos, self._say = port, metrics_port, chaos, say
        self._stopping = threading.Event()
        self._server: dict[str, float] = {}
        self.url = self.metrics_url = ""
        self._run_folder = Path()
        self.children: dict[str, Child] = {}
        self.kills: list[dict[str, Any]] = []

    def stop(self, *_: object) -> None:
        """End in order. Safe in a signal handler; a second call ends at once, without waiting for anybody."""
        if self._stopping.is_set():
            for child in self.children.values():
                child.wanted = False
                child.kill()
        self._stopping.set()

    def run(self, duration: float | None = None, on_sample: Callable[[dict[str, Any]], None] | None = None
            ) -> dict[str, Any]:
        """Until ``duration`` seconds from the first request that is answered on, ``stop``, SIGTERM or Ctrl-C, or
        the end of what is replayed. Raises ValueError where the folder holds another loop or the recipe does not fit,
        RuntimeError where a process cannot be kept up."""
        if duration is not None and not 0 < duration < float("inf"):
            raise ValueError(f"duration must be above 0 and finite, got {duration}")
        self.config = self.folder.settle(self.config)
        with _alone(self.folder.path), self._signals():
            self._take_over()
            try:
                run = prepare(self.folder, self.config, self._say, self._stopping)
            except Stopped:
                return {}
            except Exception:
                if not self.folder.store.exists():
                    self.folder.abandon()
                raise
            return self._run(run, duration, on_sample)

    def _run(self, run: Path, duration: float | None, on_sample: Callable[[dict[str, Any]], None] | None
             ) -> dict[str, Any]:
        self._run_folder = run
        port = self._port or _free_port()
        self.url = f"http://127.0.0.1:{port}"
        sampler, published = Sampler(self.folder, run), Published(self._metrics_port)
        self.metrics_url = published.url
        self.children = {name: Child(name, words, self.folder.logs / f"{name}.log", self._pid_file(name),
                                     SILENCE_S[name]) for name, words in self._commands(run, port).items()}
        self._say(f"serves at {self.url}; metrics at {self.metrics_url}")
        began = began_serving = time.monotonic()
        before = self.folder.read_status("driver").get("time", 0.0)
        scraper = threading.Thread(target=self._scrape, daemon=True)
        scraper.start()
        broom = Broom(self.folder, run, self.config.retention, self.config.window) if self.config.retention else None
        sweeper = threading.Thread(target=sweeping, args=(broom, SWEEP_EVERY_S, self._stopping, self._say), daemon=True)
        if broom is not None:
            sweeper.start()
        sample: dict[str, Any] = {}
        last_written = 0.0
        chaos = self._chaos_times(duration)
        next_kill = next(chaos, None)
        failed = answering = False
        try:
            with self.folder.samples.open("a") as samples:
                for tick in range(10**12):
                    now = time.monotonic()
                    if self._stopping.wait(max(0.0, began + 0.25 * tick - now)):
                        break
                    now = time.monotonic()
                    self._watch(now)
                    if not answering:
                        answering, began_serving = self._answering_since(before), now
                    # Not before the last one is back: what is killed again and again on a busy machine does nothing.
                    if next_kill is not None and now - began_serving >= next_kill[0] and self._all_back():
                        self._kill(next_kill[1], now)
                        next_kill = next(chaos, None)
                    if tick % 4 == 0:
                        sample = self._sample(sampler, now - began_serving)
                        published.update(sample)
                        if now - last_written >= (1.0 if now - began < 3600 else 10.0):
                            samples.write(json.dumps(sample) + "\n")
                            samples.flush()
                            last_written = now
                        if on_sample is not None:
                            on_sample(sample)
                    if self._over(now - began_serving, duration):
                        break
        except BaseException:
            failed = True
            raise
        finally:
            self._stopping.set()
            self._end(failed)
            scraper.join(5)
            if broom is not None:
                sweeper.join(30)
            published.close()
        last = self._sample(sampler, time.monotonic() - began_serving)
        with self.folder.samples.open("a") as samples:
            samples.write(json.dumps(last) + "\n")
        removed = None if broom is None else asdict(broom.swept)
        return {**last, "removed": removed, "kills": self.kills, "seconds": time.monotonic() - began_serving,
                "url": self.url}

    def _commands(self, run: Path, port: int) -> dict[str, list[str]]:
        folder = self.folder

        def own(module: str, *words: object) -> list[str]:
            return [sys.executable, "-m", f"semel.loop.{module}", str(folder.path), *map(str, words)]

        return {
            "server": command("serve", run, "--store", folder.store, "--port", port, "--state-cache", STATE_MIB,
                              "--compact-rows", COMPACT_ROWS, "--latency-target", LATENCY_TARGET_MS),
            "joiner": own("joiner"),
            "trainer": command("train", "--resume", run, "--follow", folder.rows, *overrides(self.config)),
            "driver": own("driver", self.url),
        }

    def _watch(self, now: float) -> None:
        for name, child in self.children.items():
            if name == "driver" and child.process is not None and child.process.poll() == 0 and self._finished():
                child.wanted = False
            if name == "driver" and child.process is None and not self._server:
                continue  # nothing to ask yet
            said = child.watch(now)
            if said is not None and not self._stopping.is_set():
                self._say(said)
            if child.failures >= GIVE_UP_AFTER and not child.has_lived:
                raise RuntimeError(f"{name} ends again and again: {_last_line(child.log)} (see {child.log})")
            if name == "server":
                continue  # who scrapes it signs for it
            told = _touched(self._run_folder / ALIVE) if name == "trainer" else \
                self.folder.read_status(name).get("time", 0.0)
            if told and time.time() - told < FRESH_S:
                self._alive(name, child, told)

    def _alive(self, name: str, child: Child, told: float) -> None:
        """A process told of itself, at ``told`` (by the wall clock)."""
        if child.up and told > child.started_at:
            child.sign()
        for kill in self.kills:
            if kill["process"] == name and kill["back_s"] is None and child.up and child.pid != kill["pid"] \
                    and told > kill["wall"]:
                kill["back_s"] = time.monotonic() - kill["at"]

    def _finished(self) -> bool:
        return bool(self.folder.read_status("driver").get("finished"))

    def _over(self, seconds: float, duration: float | None) -> bool:
        driver = self.children["driver"]
        return (duration is not None and seconds >= duration) or (not driver.wanted and not driver.up)

    def _sample(self, sampler: Sampler, seconds: float) -> dict[str, Any]:
        facts = {name: child.facts() for name, child in self.children.items()}
        return {**sampler.take(facts, self._server), "elapsed_s": seconds}

    def _scrape(self) -> None:
        """The server's figures, every second, in a thread of their own: a server that hangs must not stop the watch."""
        import httpx

        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while not self._stopping.wait(1.0 if self._server else 0.2):  # the driver waits for the first
                try:
                    told = time.time()
                    self._server = scrape(client.get("/metrics").raise_for_status().text)
                    self.children["server"].sign()  # also one that cannot write just now
                    if self._server.get("ready"):
                        self._alive("server", self.children["server"], told)
                except (httpx.HTTPError, ValueError):
                    pass

    def _chaos_times(self, duration: float | None) -> Iterator[tuple[float, str]]:
        """(seconds since the start, name): each process in turn."""
        number = 0
        while self._chaos is not None:
            number += 1
            at = self._chaos * number
            if duration is not None and at > duration - LAST_KILL_S:
                return
            yield at, NAMES[(number - 1) % len(NAMES)]

    def _answering_since(self, before: float) -> bool:
        """Whether a driver of this run has told of a request; ``before``: when the last one of an earlier run told."""
        status = self.folder.read_status("driver")
        return status.get("time", 0.0) > before and status.get("p50_ms") is not None

    def _all_back(self) -> bool:
        return all(kill["back_s"] is not None for kill in self.kills)

    def _kill(self, name: str, now: float) -> None:
        child = self.children[name]
        if child.pid is None:
            return
        self.kills.append({"process": name, "at": now, "wall": time.time(), "pid": child.pid, "back_s": None})
        self._say(f"killing {name} ({child.pid})")
        child.kill()

    def _end(self, failed: bool) -> None:
        """The driver first, which sends what it has; then who reads, then who serves."""
        for name in ("driver", "joiner", "trainer", "server"):
            child = self.children.get(name)
            if child is None:
                continue
            child.ask_to_end()
            code = child.wait(40.0)
            if code not in (0, 130) and not failed:  # a trainer that was interrupted ends with 130
                self._say(f"{name} did not end well: {_last_line(child.log)} (see {child.log})")

    def _take_over(self) -> None:
        for name in reversed(NAMES):
            if end_leftover(self._pid_file(name)):
                self._say(f"ended the {name} that an earlier loop left running")

    def _pid_file(self, name: str) -> Path:
        return self.folder.status / f"{name}.pid"

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # Python takes signals there only
            yield
            return
        before = {number: signal.signal(number, self.stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One supervisor a folder; released by the system however it ends."""
    handle = os.open(folder / "loop.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: a loop runs there already; stop it, or choose another --dir") from None
        yield
    finally:
        os.close(handle)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return lines[-1] if lines else "it said nothing"


def _touched(path: Path) -> float:
    """When (wall clock); 0 of what is not there."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
