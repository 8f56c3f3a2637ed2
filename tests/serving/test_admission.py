"""Admission: what waits is taken along, in order and up to a size; errors reach whom they belong to; bounds hold."""

import asyncio
import threading
import time

import pytest

from semel.serving.admission import Admission
from semel.serving.errors import Overloaded

pytestmark = pytest.mark.timeout(60)


class Work:
    """Doubles numbers; the first group waits until ``go``. ``groups``: what came together."""

    def __init__(self):
        self.groups, self.go, self.began = [], threading.Event(), threading.Event()

    def __call__(self, jobs, waited):
        assert len(waited) == len(jobs) and min(waited) >= 0
        self.groups.append(list(jobs))
        self.began.set()
        assert self.go.wait(30)
        if 99 in jobs:
            raise OSError("all of them")
        return [ValueError(job) if job < 0 else 2 * job for job in jobs]


async def begun(work, admission, jobs):
    """``jobs`` handed in while the first of them is being worked on."""
    first = asyncio.create_task(admission.run(jobs[0]))
    await asyncio.to_thread(work.began.wait, 30)
    rest = [asyncio.create_task(admission.run(job)) for job in jobs[1:]]
    await asyncio.sleep(0.05)
    return [first, *rest]


@pytest.mark.parametrize(("most", "groups"), [
    (1, [[1], [2], [3], [-4], [5]]), (5, [[1], [2, 3], [-4], [5]]), (100, [[1], [2, 3, -4, 5]])])
def test_what_waits_goes_together_in_order_and_up_to_a_size(most, groups):
    work = Work()
    admission = Admission(work, 1, 10, size=abs, most=most)

    async def main():
        tasks = await begun(work, admission, [1, 2, 3, -4, 5])
        assert admission.inside == 5
        work.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    *numbers, failed, last = asyncio.run(main())
    assert numbers == [2, 4, 6] and last == 10 and isinstance(failed, ValueError)
    assert work.groups == groups and admission.inside == 0
    admission.close()


def test_an_error_of_the_work_is_that_of_its_group_only():
    work = Work()
    admission = Admission(work, 1, 10, most=2)

    async def main():
        tasks = await begun(work, admission, [1, 99, 2, 3])
        work.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    one, broken, neighbour, three = asyncio.run(main())
    assert (one, three) == (2, 6) and isinstance(broken, OSError) and isinstance(neighbour, OSError)
    admission.close()


def test_more_than_the_queue_is_refused_and_a_client_that_left_keeps_its_place():
    work = Work()
    admission = Admission(work, 1, 2, most=1)

    async def main():
        tasks = await begun(work, admission, [1, 2, 3])
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert admission.full
        with pytest.raises(Overloaded):
            await admission.run(4)
        work.go.set()
        return await asyncio.gather(tasks[0], tasks[2])

    assert asyncio.run(main()) == [2, 6]
    admission.close()
    assert work.groups == [[1], [2], [3]]


def test_bad_arguments():
    for workers, queue in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="at least one scorer"):
            Admission(Work(), workers, queue)


def test_what_would_be_late_is_refused_at_once_and_what_nobody_is_ahead_of_is_not():
    def slow(jobs, waited):
        time.sleep(0.05)
        return jobs

    admission = Admission(slow, 1, 100, target=0.2)

    async def main():
        for number in range(3):  # learn how long it takes; alone each is admitted
            assert await admission.run(number) == number
        answers = await asyncio.gather(*(admission.run(number) for number in range(10)), return_exceptions=True)
        assert not admission.inside and admission.expected() < 0.2
        assert await admission.run(1) == 1  # the overload is over
        return answers

    answers = asyncio.run(main())
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert 1 <= len(answers) - len(refused) <= 4  # 3 ahead and the own work fit into 0.2 s if all takes 0.05 s; no 4
    assert all("the target" in str(error) and error.retry_after == 1 for error in refused)
    admission.close()


def test_kinds_of_work_are_not_mixed_and_each_is_expected_to_take_its_own_time():
    groups = []

    def work(jobs, waited):
        groups.append(jobs)
        time.sleep(0.1 if jobs[0].startswith("search") else 0.002)
        return jobs

    admission = Admission(work, 1, 100, most=100, kind=lambda job: job.split()[0])

    async def main():
        for _ in range(3):
            await admission.run("search 0")
            await admission.run("rank 0")
        groups.clear()
        await asyncio.gather(*(admission.run(f"{kind} {number}") for kind in ("rank", "search") for number in range(4)))

    asyncio.run(main())
    assert all(len({job.split()[0] for job in group}) == 1 for group in groups)
    assert admission.expected(1, "search") > 5 * admission.expected(1, "rank")
    admission.close()


def test_settling_waits_for_what_is_under_way_only():
    work = Work()
    admission = Admission(work, 1, 10)

    async def main():
        tasks = await begun(work, admission, [1])
        assert not await asyncio.to_thread(admission.settle, 0.05)
        work.go.set()
        assert await asyncio.to_thread(admission.settle, 30)
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [2]
    admission.close()
