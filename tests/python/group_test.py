"""init_process_group("lockstep"): what PyTorch's tools require of a group.

usage: PYTHONPATH=build/python python tests/python/group_test.py [unittest arguments]
"""

import datetime
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.profiler import profile

import ranks
from ranks import body, expect_error, run


@body
def sequence_numbers(rank, size):
    world, pair = dist.group.WORLD, dist.new_group()
    for group in (world, pair):
        group._set_sequence_number_for_group()
        before = group._get_sequence_number_for_group()
        for _ in range(3):
            dist.all_reduce(torch.ones(3), group=group)
        assert group._get_sequence_number_for_group() == before + 3
    # A call that one rank refuses counts on all of them.
    expect_error("refused", lambda: dist.all_reduce(torch.ones(1).expand(4) if rank else torch.ones(4)))
    numbers = [None] * size
    dist.all_gather_object(numbers, world._get_sequence_number_for_group())
    assert numbers[0] == numbers[1], numbers


@body
def timeouts(rank, size):
    first, second = datetime.timedelta(minutes=7), datetime.timedelta(milliseconds=300)
    group = dist.new_group(timeout=first)
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == first and backend.options.backend == "lockstep"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed_c10d._set_pg_timeout(second, group)
    assert backend.options._timeout == second
    if rank == 0:
        expect_error("Timed out", lambda: dist.all_reduce(torch.ones(3), group=group))
    dist.barrier()
    distributed_c10d._set_pg_timeout(first)  # of the default group
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == first


def calls(rank):
    """Operations whose rows PyTorch's tools count."""
    x, two = torch.ones(4), [torch.ones(4), torch.ones(4)]
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    dist.broadcast(x, src=0)
    dist.all_gather(two, x)
    dist.reduce(x, dst=1)
    dist.scatter(x, two if rank == 0 else None, src=0)
    dist.gather(x, two if rank == 0 else None, dst=0)
    dist.all_to_all_single(x, x.clone())
    dist.barrier()
    if rank == 0:
        dist.send(x, dst=1)
    else:
        dist.recv(x, src=0)


@body
def rows(rank, size):
    backend = os.environ["TEST_BACKEND"]
    with profile(record_shapes=True) as profiler:
        calls(rank)
    found = {row.key: (row.count, row.input_shapes) for row in profiler.key_averages(group_by_input_shape=True)
             if row.key.startswith(backend + ":")}
    counts = {name.split(":")[1]: count for name, (count, _) in found.items()}
    assert counts == {"all_reduce": 2, "broadcast": 1, "all_gather": 1, "reduce": 1, "scatter": 1, "gather": 1,
                      "all_to_all": 1, "barrier": 1, "recv" if rank else "send": 1}, counts
    assert found[backend + ":all_reduce"][1] == [[4]], found
    dist.all_reduce(torch.ones(3))  # without the profiler


class Group(ranks.TestCase):
    def test_sequence_numbers(self):
        self.check(run("sequence_numbers"))

    def test_timeouts_can_be_read_and_set(self):
        self.check(run("timeouts"))

    def test_operations_have_rows_in_the_profiler(self):
        for backend in ("gloo", "lockstep"):
            with self.subTest(backend):
                self.check(run("rows", backend))


if __name__ == "__main__":
    ranks.main()
