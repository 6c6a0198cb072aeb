"""init_process_group("lockstep"): calls that a rank refuses, and calls that it accepts although gloo does not.

usage: PYTHONPATH=build/python python tests/python/refusal_test.py [unittest arguments]
"""

import os

import torch
import torch.distributed as dist

import ranks
from ranks import batch, body, expect_error, run


@body
def averages(rank, size):
    """Averages of integers: as in NCCL, the sum is divided and truncated toward zero."""
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        for count in (1, 300_000):  # in slots, and staged
            values = torch.tensor([7, -7, -1] * count, dtype=dtype)
            dist.all_reduce(x := values * (1 - rank), op=dist.ReduceOp.AVG)
            assert torch.equal(x, torch.tensor([3, -3, 0] * count, dtype=dtype)), (dtype, x[:3])
    dist.all_reduce(x := torch.tensor([200, 9 + 2 * rank], dtype=torch.uint8), op=dist.ReduceOp.AVG)
    assert x.tolist() == [(400 - 256) // 2, 10], x  # the sum wraps around
    dist.reduce(x := torch.tensor([5 * rank]), dst=1, op=dist.ReduceOp.AVG)
    assert rank == 0 or x.item() == 2
    dist.reduce_scatter_tensor(x := torch.zeros(1, dtype=torch.int64), torch.tensor([-3 * rank, -5 * rank]),
                               op=dist.ReduceOp.AVG)
    assert x.item() == (-1, -2)[rank]


@body
def advice(rank, size):
    """Refusals name the backend and the remedy."""
    expanded, ones = torch.ones(1).expand(4), torch.ones(4)
    for pattern, call in (
            (r"avg of bool is not defined: .*tensor\.float\(\)", lambda: dist.all_reduce(ones.bool(), op=dist.ReduceOp.AVG)),
            ("and of float32 is not defined: .*integers", lambda: dist.all_reduce(ones, op=dist.ReduceOp.BAND)),
            ("sum of uint16 is not defined: .*int64", lambda: dist.all_reduce(ones.to(torch.uint16))),
            (r"use clone\(\)", lambda: dist.all_reduce(expanded)),
            (r"use clone\(\)", lambda: dist.broadcast(expanded, src=0)),
            (r"one dtype.*tensor\.to\(\)", lambda: dist.all_gather_into_tensor(torch.ones(2), ones[:1].long())),
            (r"only be summed.*to_dense\(\)", lambda: dist.all_reduce(ones.to_sparse(), op=dist.ReduceOp.MAX)),
            ("PREMUL_SUM multiply", lambda: dist.all_reduce(ones, op=dist._make_nccl_premul_sum(2.0)))):
        expect_error(f"^lockstep: rank {rank} refused [a-z_]+: .*{pattern}", call)


@body
def by_one_rank(rank, size):
    """The peers get the refusal, and the group stays usable."""
    bad = rank == 1
    expanded, ones = torch.ones(1).expand(4), torch.ones(4)
    mine = expanded if bad else ones  # a result cannot be written there
    sparse = ones.to_sparse()
    for pattern, call in (
            (r"all_reduce: .*clone\(\)", lambda: dist.all_reduce(mine)),
            (r"all_reduce: .*clone\(\)", lambda: dist.all_reduce(mine, async_op=True).wait()),
            (r"all_reduce: .*clone\(\)", lambda: dist.all_reduce(mine, async_op=True).get_future().wait()),
            (r"broadcast: .*clone\(\)", lambda: dist.broadcast(mine, src=0)),
            (r"reduce: .*clone\(\)", lambda: dist.reduce(mine, dst=0)),
            ("all_gather: .*room for 5", lambda: dist.all_gather([torch.ones(5 if bad else 4) for _ in range(2)], ones)),
            ("reduce_scatter: .*output has 2", lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(10 if bad else 4))),
            ("all_to_all: expected 2 inputs", lambda: dist.all_to_all_single(ones, ones.clone(), None, [4] if bad else [2, 2])),
            ("all_reduce: .*only be summed", lambda: dist.all_reduce(sparse, op=dist.ReduceOp.MAX if bad else dist.ReduceOp.SUM)),
            # Other operations of the same call: the rank that refuses one takes part in the rest.
            (r"all_reduce: .*clone\(\)", lambda: dist.all_reduce_coalesced([ones.clone(), mine, ones.clone()])),
            # It refuses a collective that its peers do not call.
            (r"all_reduce: .*clone\(\)", lambda: dist.all_reduce(mine) if bad else dist.barrier())):
        ones.fill_(1)
        expect_error(f"^lockstep: rank 1 refused {pattern}", call)
        assert bool((ones == 1).all()), ones
        dist.all_reduce(x := torch.full((300_000,), rank + 1.0))
        assert x[0] == 3 and x[-1] == 3
    works = [dist.all_reduce(x, async_op=True) for x in (torch.ones(10), torch.ones(10))]
    if bad:
        expect_error("refused", lambda: dist.all_reduce(expanded))
    else:
        works.append(dist.all_reduce(ones, async_op=True))
        expect_error("refused", works.pop().wait)
    for work in works:  # begun before it
        work.wait()
    dist.barrier()


@body
def and_ends(rank, size):
    """A rank that refuses, destroys the group and ends does not block its peers."""
    if rank == 1:
        expect_error("refused", lambda: dist.all_reduce(torch.ones(1).expand(4)))
    else:
        expect_error("rank 1 (refused all_reduce|has ended|has left the group)", lambda: dist.all_reduce(torch.ones(4)))


@body
def shorter_messages(rank, size):
    """A message may be shorter than the tensor that receives it: it fills the first part, like with gloo."""
    lockstep = os.environ["TEST_BACKEND"] == "lockstep"
    other = 1 - rank
    for count in (0, 3, 100_000):
        room = torch.full((count + 5,), -1.0)
        gaps = torch.full((count + 5, 2), -1.0)[:, 0]  # gloo requires memory without gaps
        grid = torch.full((2, count + 1), -1.0)  # of another shape
        for receive in (room, gaps, grid) if lockstep else (room, grid):
            for early in (False, True):
                receive.fill_(-1)
                if rank == 0:
                    if not early:
                        dist.barrier()  # receive first, or message first
                    work = dist.isend(batch(count, count), dst=1)
                    if early:
                        dist.barrier()
                    work.wait()
                else:
                    if early:
                        dist.barrier()
                        assert dist.recv(receive) == 0  # from any rank
                    else:
                        work = dist.irecv(receive, src=0)
                        dist.barrier()
                        work.wait()
                    flat = receive.reshape(-1)
                    assert torch.equal(flat[:count], batch(count, count)) and (flat[count:] == -1).all(), (count, flat)
    if not lockstep:
        return
    # Longer ones, and those of another dtype, are errors on both sides, and the group stays usable.
    for pattern, sent, received in ((r"differ in size: .*\[5\].*\[4\]", torch.ones(5), torch.zeros(4)),
                                    ("differ in dtype", torch.ones(3, dtype=torch.int64), torch.zeros(4))):
        expect_error(pattern, lambda: dist.send(sent, dst=other) if rank else dist.recv(received, src=other))
        assert (received == 0).all()
    dist.all_reduce(x := torch.ones(3))
    assert x[0] == 2


class Refusal(ranks.TestCase):
    def test_averages_of_integers_are_those_of_nccl(self):
        self.check(run("averages"))

    def test_one_ranks_refusal_reaches_the_others_and_the_group_lives(self):
        self.check(run("by_one_rank"))

    def test_a_rank_may_end_after_its_refusal(self):
        self.check(run("and_ends"))

    def test_a_message_may_be_shorter_than_its_tensor(self):
        for backend in ("gloo", "lockstep"):
            with self.subTest(backend):
                self.check(run("shorter_messages", backend))

    def test_refusals_say_what_to_do(self):
        self.check(run("advice"))


if __name__ == "__main__":
    ranks.main()
