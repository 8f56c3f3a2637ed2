"""All transports move the same rows: real processes over gloo, one group of three for all checks."""

import pytest
import torch
import transport_checks

from semel.comm import Alone, CopyEngine, PeerLost, Throttled, run_threads, spawn
from semel.comm.transport import transport

CHECKS = [*(f"equal_exchange:{name}" for name in transport_checks.TRANSPORTS), "large_exchange:collective",
          "large_exchange:staged", "two_threads_with_a_transport_each", "groups_of_some", "throttled_link",
          "exchange_with_uneven_data"]


@pytest.fixture(scope="module")
def results():
    return spawn(transport_checks.run_all, 3, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_three_processes(results, check):
    for rank, of_rank in enumerate(results):
        trace, _ = of_rank[check]
        assert not trace, f"rank {rank}: {trace}"


def test_ranks_that_run_out_of_data_join_until_the_last_one_does(results):
    steps = [of_rank["exchange_with_uneven_data"][1] for of_rank in results]
    assert [len(s) for s in steps] == [3, 3, 3]
    assert sorted(i for s in steps for step in s for i in step) == sorted(
        f"{rank}-{batch}-{i}" for rank, batches in enumerate((0, 1, 3)) for batch in range(batches) for i in range(4))


def test_alone_and_threads_move_the_same_rows():
    def every_type(t):
        for seed, (dtype, tail) in enumerate((d, x) for d in transport_checks.DTYPES for x in transport_checks.TAILS):
            counts, values = transport_checks.drawn(t.world_size, dtype, tail, seed)
            handle = t.all_to_all(values[t.rank], counts[t.rank].tolist(), counts[:, t.rank].tolist())
            expected = torch.cat([values[s].split(counts[s].tolist())[t.rank] for s in range(t.world_size)])
            assert torch.equal(t.all_gather(values[0]).wait(), torch.stack([values[0]] * t.world_size))
            assert torch.equal(handle.wait(), expected) and handle.wait() is handle.wait()

    every_type(Alone())
    every_type(Throttled(Alone(), 1e9))
    run_threads(1, every_type)
    run_threads(4, every_type)


def test_what_is_sent_is_a_copy():
    sent = torch.ones(2)
    received = Alone().all_to_all(sent, [2], [2]).wait()
    sent[:] = 0
    assert received.tolist() == [1, 1]


def test_threads_notice_calls_that_do_not_match():
    def other_call(t):
        (t.all_gather(torch.ones(2)) if t.rank else t.all_to_all(torch.ones(2), [1, 1], [1, 1])).wait()

    with pytest.raises(PeerLost, match=r"call 1: rank . expects all_\w+ of .*sends all_"):
        run_threads(2, other_call)
    with pytest.raises(PeerLost, match="rank 1 has sent nothing to rank 0"):
        run_threads(2, lambda t: None if t.rank else t.all_gather(torch.ones(1)).wait(), timeout_s=0.1)


@pytest.mark.parametrize(("send", "receive", "says"), [
    ([3], [3], "values of shape .2. for 3 rows to send"), ([1, 1], [1, 1], "send must be 1 counts"),
    ([2], [1], "rank 0 sends itself 2 rows, but receives 1"), ([2], [-2], "receive must be 1 counts from 0 on"),
])
def test_counts_that_do_not_fit_are_refused(send, receive, says):
    with pytest.raises(ValueError, match=says):
        Alone().all_to_all(torch.ones(2), send, receive)


def test_which_transport():
    assert isinstance(transport(), Alone) and isinstance(transport("staged"), Alone)
    with pytest.raises(ValueError, match="got 'rdma'"):
        transport("rdma")
    with pytest.raises(ValueError, match="bytes_per_s must be above 0"):
        Throttled(Alone(), 0)
    with pytest.raises(RuntimeError, match=r'copy_engine is not available: it needs a CUDA device, got cpu; use '
                                           r'transport\("collective"\) there, or transport\("staged"\)'):
        CopyEngine(device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_copy_engine_says_what_is_missing():
    with pytest.raises(RuntimeError, match="copy_engine is not available: no CUDA device is visible"):
        transport("copy_engine", device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_staged_copies_from_and_to_a_device():
    """Two processes may share one."""
    check = "equal_exchange:staged on cuda"
    for of_rank in spawn(transport_checks.run_all, 2, [check]):
        assert not of_rank[check][0]
