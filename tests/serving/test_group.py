"""Group commit: one durable write for all that wait, each with its own answer."""

import threading

import pytest

from semel.serving.errors import Overloaded
from semel.serving.group import GroupCommit


def test_jobs_that_wait_are_committed_together_and_each_gets_its_result():
    groups, gate = [], threading.Event()

    def commit(jobs):
        gate.wait(10)
        groups.append(list(jobs))
        return [job * 10 for job in jobs]

    group = GroupCommit("test", commit)
    first = group.submit(1)
    others = [group.submit(number) for number in range(2, 6)]
    gate.set()
    assert [future.result(10) for future in (first, *others)] == [10, 20, 30, 40, 50]
    assert [job for jobs in groups for job in jobs] == [1, 2, 3, 4, 5]
    assert len(groups) <= 2  # the first alone or with some, the rest together
    group.close()


def test_an_exception_among_the_results_is_its_jobs_alone():
    group = GroupCommit("test", lambda jobs: [ValueError("odd") if job % 2 else job for job in jobs], linger=0.05)
    futures = [group.submit(number) for number in range(4)]
    assert futures[0].result(10) == 0 and futures[2].result(10) == 2
    with pytest.raises(ValueError, match="odd"):
        futures[1].result(10)
    group.close()


def test_a_failed_commit_fails_its_group_and_the_writer_goes_on():
    broken = [True]

    def commit(jobs):
        if broken[0]:
            raise OSError("disk full")
        return list(jobs)

    group = GroupCommit("test", commit)
    with pytest.raises(OSError, match="disk full"):
        group.submit(1).result(10)
    assert "disk full" in str(group.failure)
    broken[0] = False
    assert group.submit(2).result(10) == 2 and group.failure is None
    group.close()


def test_the_queue_is_bounded():
    gate = threading.Event()
    group = GroupCommit("test", lambda jobs: gate.wait(10) and list(jobs), max_pending=2)
    first = group.submit(0)
    while group.pending and not group._busy:  # until the writer has taken the first
        pass
    waiting = [group.submit(1), group.submit(2)]
    with pytest.raises(Overloaded, match="2 jobs wait for the test writer"):
        group.submit(3)
    gate.set()
    assert [future.result(10) for future in (first, *waiting)] == [0, 1, 2]
    group.close()


def test_retry_keeps_jobs_until_they_are_written():
    attempts = []

    def commit(jobs):
        attempts.append(list(jobs))
        if len(attempts) == 1:
            raise OSError("disk full")
        return list(jobs)

    group = GroupCommit("test", commit, retry=(OSError,))
    assert group.submit("exposure").result(10) == "exposure"
    assert attempts == [["exposure"], ["exposure"]] and group.failed == 0
    group.close()


def test_what_no_retry_can_mend_is_given_up_and_counted():
    def commit(jobs):
        if "bad" in jobs:
            raise ValueError("never")
        return list(jobs)

    group = GroupCommit("test", commit, retry=(OSError,))
    with pytest.raises(ValueError, match="never"):
        group.submit("bad").result(10)
    assert group.submit("good").result(10) == "good" and group.failed == 1
    group.close()


def test_closing_writes_what_waits_and_says_what_was_lost():
    written = []
    group = GroupCommit("test", lambda jobs: written.extend(jobs) or list(jobs), linger=60)
    for number in range(10):
        group.submit(number)
    group.close()
    assert written == list(range(10))
    with pytest.raises(RuntimeError, match="closed"):
        group.submit(11)

    def fail(jobs):
        raise OSError("disk full")

    group = GroupCommit("test", fail, linger=60, retry=(OSError,))
    group.submit(1)
    with pytest.raises(OSError, match="lost what it could not write: disk full"):
        group.close()


def test_flush_does_not_wait_for_the_linger():
    group = GroupCommit("test", lambda jobs: list(jobs), linger=60)
    group.submit(1)
    assert group.flush(timeout=10)
    assert group.pending == 0
    group.close()
