"""init_process_group("lockstep"): calls that a rank refuses, and those that it takes although gloo does not.

usage: PYTHONPATH=build/python python tests/python/refusal_test.py [unittest arguments]
"""

import torch
import torch.distributed as dist

import ranks
from ranks import batch, body, expect_error, run


@body
def averages(rank, size):
    """Of integers: what NCCL does, the sum divided and truncated toward zero."""
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
    """Refusals name the backend, and say what to do."""
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


class Refusal(ranks.TestCase):
    def test_averages_of_integers_are_those_of_nccl(self):
        self.check(run("averages"))

    def test_refusals_say_what_to_do(self):
        self.check(run("advice"))


if __name__ == "__main__":
    ranks.main()
