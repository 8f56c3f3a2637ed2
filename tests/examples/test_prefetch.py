import threading
import time

import pytest

from semel.examples.prefetch import AHEAD, pipeline


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("semel-loader")]


def soon(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_the_next_items_are_read_while_one_is_made_and_no_more_than_a_bound():
    made = threading.Event()
    read: list[int] = []

    def make(item):
        assert made.wait(60)
        return -item

    results = pipeline(range(100), lambda item: read.append(item) or item, make, workers=1)
    consumer = threading.Thread(target=lambda: next(results))
    consumer.start()
    soon(lambda: len(read) == AHEAD + 1)  # all that may be begun is read, though none is made
    assert consumer.is_alive()
    made.set()
    consumer.join(60)
    assert next(results) == -1
    soon(lambda: len(read) == AHEAD + 2)
    time.sleep(0.05)
    assert len(read) == AHEAD + 2  # nobody took more
    results.close()
    assert not threads()


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_whichever_is_ready_first(workers):
    def read(item):
        time.sleep(0.01 * (item % 3))
        return item

    assert list(pipeline(range(12), read, lambda item: 2 * item, workers)) == list(range(0, 24, 2))
    assert not threads()


@pytest.mark.parametrize("stage", ["read", "make"])
def test_an_error_comes_out_at_its_item(stage):
    def fail(item):
        if item == 3:
            raise ValueError("item 3")
        return item

    stages = {"read": lambda item: item, "make": lambda item: item} | {stage: fail}
    got = []
    with pytest.raises(ValueError, match="item 3"):
        got.extend(pipeline(range(9), stages["read"], stages["make"], 2))
    assert got == [0, 1, 2]
    assert not threads()


def test_closing_early_does_not_wait_for_what_was_not_begun():
    begun = []

    def read(item):
        begun.append(item)
        time.sleep(0.02)
        return item

    results = pipeline(range(1000), read, lambda item: item, 1)
    assert next(results) == 0
    results.close()
    assert len(begun) <= AHEAD + 3 and not threads()
