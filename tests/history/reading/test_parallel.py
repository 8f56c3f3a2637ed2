"""Jobs on threads: results in order, the first failure raised once all are done."""

import threading

import pytest

from semel.history.reading import parallel


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_the_order_of_the_jobs(threads):
    assert parallel.run([(divmod, (n, 7)) for n in range(40)], threads) == [divmod(n, 7) for n in range(40)]
    assert parallel.run([], threads) == []


@pytest.mark.timeout(60)
def test_the_first_failure_is_raised_when_all_are_done():
    done, together = [], threading.Barrier(2)

    def job(number):
        if number < 2:
            together.wait(30)  # two threads are at work
        if number in (1, 5):
            raise ValueError(f"job {number}")
        done.append(number)

    with pytest.raises(ValueError, match="job 1"):
        parallel.run([(job, (number,)) for number in range(8)], 2)
    assert sorted(done) == [0, 2, 3, 4, 6, 7]
