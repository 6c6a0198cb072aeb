"""init_process_group("lockstep"), with 2 processes: PyTorch's functions give gloo's results on it, and failures are
reported.

usage: PYTHONPATH=build/python python tests/python/backend_test.py [unittest arguments]
"""

import datetime
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import torch
import torch.distributed as dist

import ranks
from ranks import LIMIT, await_rank_0, batch, body, expect_error, from_the_start, run

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "faults"))
from harness import Lateness  # noqa: E402


# ---- runs on every rank, on gloo and on lockstep
# ------------------------------------------------------------------------


def model(*sizes):
    torch.manual_seed(7)
    layers = [torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.Tanh()) for a, b in zip(sizes, sizes[1:])]
    return torch.nn.Sequential(*layers)


def train(module, optimizer, rank, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        module(batch(10 * step + rank, 8, 32)).pow(2).mean().backward()
        optimizer.step()


def collectives(rank, size):
    results = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for count in (0, 1, 1000, 300_000):
            values = (batch(rank, count) * 10).abs().to(dtype)
            if dtype != torch.bool:
                dist.all_reduce(reduced := values.clone())
                results.append(reduced)
            dist.broadcast(sent := values.clone(), src=1)
            parts = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(parts, values)
            results += [sent, *parts]
    turned = batch(rank, 40, 30).t()  # not contiguous
    dist.all_reduce(turned)
    results.append(turned)

    into, piece, got = torch.empty(size * 10), torch.empty(10), torch.empty(3)
    dist.all_gather_into_tensor(into, batch(rank, 10))
    dist.reduce_scatter_tensor(piece, batch(rank, size * 10))
    dist.scatter(got, [batch(r, 3) for r in range(size)] if rank == 1 else None, src=1)
    gathered = [torch.empty(5) for _ in range(size)] if rank == 0 else []
    dist.gather(batch(rank, 5), gathered or None, dst=0)
    exchanged = torch.empty(3 + 2 * rank)
    dist.all_to_all_single(exchanged, batch(rank, 3 + 2 * rank), [1 + rank, 2 + rank], [1 + rank, 2 + rank])
    dist.reduce(product := batch(rank, 7), dst=1, op=dist.ReduceOp.PRODUCT)
    results += [into, piece, got, exchanged, *gathered, *([product] if rank == 1 else [])]

    many = [batch(rank, n) for n in range(1, 60)]
    for work in reversed([dist.all_reduce(tensor, async_op=True) for tensor in many]):
        work.wait()
    dist.all_reduce_coalesced(some := [batch(rank, 10), batch(rank, 20)])
    dist.all_reduce(sparse := torch.sparse_coo_tensor([[0, rank + 1, 3]], batch(rank, 3), (5,)))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == list(range(size))
    dist.barrier()
    return results + many + some + [sparse.to_dense()]


def messages(rank, size):
    other = 1 - rank
    first = dist.irecv(received := torch.empty(1000), src=other)  # posted first on both sides
    dist.isend(batch(rank, 1000), dst=other).wait()
    first.wait()
    anybody = torch.empty(10)
    if rank == 0:
        dist.send(batch(5, 10), dst=1, tag=3)
        dist.recv(anybody, src=1, tag=4)
    else:
        assert dist.recv(anybody, tag=3) == 0
        dist.send(anybody * 2, dst=0, tag=4)
    both = torch.empty(4)
    for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, batch(rank, 4), other), dist.P2POp(dist.irecv, both, other)]):
        work.wait()
    return [received, anybody, both]


def groups(rank, size):
    alone = [dist.new_group([r]) for r in range(size)][rank]
    dist.all_reduce(own := batch(rank, 5), group=alone)
    turned = dist.new_group(list(reversed(range(size))))
    dist.all_reduce(summed := batch(rank, 5), group=turned)
    dist.destroy_process_group(turned)
    return [own, summed]


def data_parallel(rank, size):
    from torch.nn.parallel import DistributedDataParallel

    results = []
    for options in ({}, {"gradient_as_bucket_view": True, "static_graph": True}, {"find_unused_parameters": True},
                    {"bucket_cap_mb": 0.001}):
        module = DistributedDataParallel(model(32, 64, 64, 8), **options)
        train(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), rank)
        results += [p.detach().clone() for p in module.parameters()]
    embedding = DistributedDataParallel(torch.nn.Embedding(20, 4, sparse=True, _weight=torch.ones(20, 4)))
    embedding(torch.tensor([rank, 3, 3 + rank])).sum().backward()
    return results + [embedding.module.weight.grad.to_dense()]


def fully_sharded(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    module = model(32, 64, 64, 8)
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    train(module, torch.optim.AdamW(module.parameters(), lr=0.01), rank)
    return [p.full_tensor().detach() for p in module.parameters()]


def tensors_in_shards(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    a, b = batch(1, 16, 24), batch(2, 24, 12)
    rows, columns = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(0)])
    product = rows @ columns.redistribute(mesh, [Replicate()])
    partial = distribute_tensor(a, mesh, [Shard(1)]) @ columns
    turned = product.redistribute(mesh, [Shard(1)])
    local = DTensor.from_local(batch(rank, 3, 2), mesh, [Shard(0)])
    return [product.full_tensor(), partial.full_tensor(), turned.to_local(), local.full_tensor()]


def pipeline(rank, size):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    results = []
    for schedule_type in (ScheduleGPipe, Schedule1F1B):
        layers = model(32, 48, 32)
        stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
        schedule = schedule_type(stage, n_microbatches=4, loss_fn=lambda y, target: (y - target).pow(2).mean())
        if rank == 0:
            schedule.step(batch(1, 16, 32))
        else:
            schedule.step(target=batch(2, 16, 32), losses=(losses := []))
            results += [loss.detach() for loss in losses]
        results += [p.grad for p in layers[rank].parameters()]
    return results


def checkpoint(rank, size):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    folder = os.environ["TEST_FOLDER"] + "/checkpoint." + os.environ["TEST_BACKEND"]
    state = {"sharded": distribute_tensor(batch(1, 10, 6), mesh, [Shard(0)]), "whole": batch(2, 5)}
    dcp.save(state, checkpoint_id=folder)
    again = {"sharded": distribute_tensor(torch.zeros(10, 6), mesh, [Shard(1)]), "whole": torch.zeros(5)}
    dcp.load(again, checkpoint_id=folder)
    return [again["sharded"].full_tensor(), again["whole"]]


def functional(rank, size):
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    x = batch(rank, 6, 4)
    results = [
        funcol.all_reduce(x, "sum", group),
        funcol.all_gather_tensor(x, 0, group),
        funcol.reduce_scatter_tensor(x, "sum", 0, group),
        funcol.all_to_all_single(x, None, None, group),
        funcol.broadcast(x, 1, group),
        *funcol.all_reduce_coalesced([x, x * 2], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([x, x * 2], group),
        *funcol.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group),
    ]
    return [each.clone() for each in results]


PARITY = [collectives, messages, groups, data_parallel, fully_sharded, tensors_in_shards, pipeline, checkpoint, functional]


@body
def parity(rank, size):
    results = {each.__name__: each(rank, size) for each in PARITY}
    torch.save(results, f"{os.environ['TEST_FOLDER']}/{os.environ['TEST_BACKEND']}.{rank}")


# ---- runs only on lockstep
# ----------------------------------------------------------------------------------------------


@body
def strides(rank, size):
    """Tensors with gaps between their elements, for which gloo gives other results."""
    def gaps():
        return torch.full((40, 60), -1.0)[:, ::2].copy_(batch(rank, 40, 30))

    dist.broadcast(sent := gaps(), src=0)
    dist.all_reduce(summed := gaps())
    dist.all_gather([first := gaps().zero_(), second := gaps().zero_()], gaps())
    work = dist.irecv(received := gaps().zero_(), src=1 - rank)
    dist.send(gaps(), dst=1 - rank)
    work.wait()
    whole = batch(0, 40, 30), batch(1, 40, 30)
    for result, expected in ((sent, whole[0]), (summed, whole[0] + whole[1]), (first, whole[0]), (second, whole[1]),
                             (received, whole[1 - rank])):
        assert torch.equal(result, expected) and not result.is_contiguous()
        assert (torch.as_strided(result, (40, 30), (60, 2), 1) == -1).all()  # the gaps stay unchanged


@body
def operands(rank, size):
    """Errors that a rank can detect alone are refused without side effects, and the group stays usable."""
    def ones(*sizes):
        return [torch.ones(n) for n in sizes]

    world = dist.group.WORLD
    for pattern, call in (
            ("room for 5", lambda: dist.all_gather(ones(5, 5), torch.ones(3))),
            ("expected 2 outputs", lambda: dist.all_gather(ones(3), torch.ones(3))),
            ("room for 5", lambda: dist.all_gather_into_tensor(torch.ones(10), torch.ones(3))),
            ("the output has 2", lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(10))),
            ("the output has 2", lambda: dist.reduce_scatter(torch.ones(2), ones(5, 5))),
            ("expected 2 inputs", lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [4], [4])),
            ("expected 2 inputs", lambda: dist.all_to_all(ones(2, 2, 2), ones(2, 2, 2))),
            ("root.*got 7", lambda: dist.broadcast(torch.ones(2), src=7)),
            ("peer, got 5", lambda: dist.isend(torch.ones(2), group_dst=5, group=world)),
            ("peer, got 5", lambda: dist.irecv(torch.ones(2), group_src=5, group=world))):
        expect_error(pattern, call)
    dist.all_reduce(x := torch.ones(3))
    assert x[0] == 2


@body
def written_over(rank, size):
    """Tensors that are both input and output."""
    for count in (4, 400_000):  # in slots, and staged or in place
        x = torch.arange(count, dtype=torch.float32) + rank * count
        dist.all_to_all_single(expected := torch.empty(count), x)
        dist.all_to_all_single(x, x)
        assert torch.equal(x, expected)
        x = torch.arange(count, dtype=torch.float32) * (rank + 1)
        for piece in range(size):  # the rank's own piece, and another's
            dist.reduce_scatter_tensor(expected := torch.empty(count // size), x)
            y = x.clone()
            dist.reduce_scatter_tensor(out := y[piece * (count // size):][:count // size], y)
            assert torch.equal(out, expected)
            dist.all_gather_into_tensor(expected := torch.empty(count), x[:count // size])
            y = x.clone()
            y[piece * (count // size):][:count // size] = x[:count // size]
            dist.all_gather_into_tensor(y, y[piece * (count // size):][:count // size])
            assert torch.equal(y, expected)


@body
def allocated(rank, size):
    """Tensors in shared memory behave like other tensors."""
    import copy
    import pickle

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def allocate(count):
        return backend.allocate_tensor(count, dtype=torch.float32, device=torch.device("cpu"))

    for count in (1, 100_000):
        x = allocate(count).fill_(rank + 1)
        dist.all_reduce(x)
        x.resize_(2 * count).fill_(rank + 1)
        dist.all_reduce(x)
        dist.all_reduce(x[::2])
        assert x[0] == 6 and x[-1] == 3
        for other in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), x.numpy(), x.share_memory_()):
            assert other[0] == 6 and other[-1] == 3
        dist.all_reduce(x)
        assert x[0] == 12
    for count in (-1, 1 << 62, (1 << 63) - 1):
        expect_error("cannot be allocated", lambda: allocate(count))
    expect_error("of shared memory: ", lambda: allocate(1 << 40))


@body
def callbacks(rank, size):
    """Futures' callbacks issue collectives and wait for them, on whatever thread they run."""
    other = dist.new_group()
    seen = []

    def then(future):
        dist.all_reduce(x := future.value()[0].clone(), group=other)
        seen.append(x[0].item())
        return x

    for _ in range(20):
        future = dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(then)
        assert future.wait()[0].item() == 4, future.value()
    assert seen == [4.0] * 20, seen


@body
def patient_callbacks(rank, size):
    """Callbacks that wait for later operations, on whatever thread they run."""
    import threading

    for number, wait in enumerate((lambda work: work.wait(), lambda work: work.get_future().wait())):
        later = threading.Event()
        if rank == 1:
            await_rank_0(rank, f"callback {number}")  # the first is not done when rank 0 runs its callback
        first = dist.all_reduce(torch.ones(1000), async_op=True).get_future()
        if rank == 0:
            first = first.then(lambda _: later.wait(LIMIT))
            await_rank_0(rank, f"callback {number}")
        wait(dist.all_reduce(torch.ones(1000), async_op=True))
        later.set()
        assert rank == 1 or first.wait() is True
    later = threading.Event()
    if rank == 1:
        await_rank_0(rank, "callbacks")
    futures = [dist.all_reduce(torch.ones(10), async_op=True).get_future() for _ in range(5)]
    if rank == 0:
        futures[:4] = [each.then(lambda _: later.wait(LIMIT)) for each in futures[:4]]
        futures[4].then(lambda _: later.set())
        await_rank_0(rank, "callbacks")
        assert all(each.wait() for each in futures[:4])


@body
def loaders(rank, size):
    """Processes that are forked meanwhile do not interfere."""
    from torch.utils.data import DataLoader

    data = [torch.tensor(float(i)) for i in range(64)]
    for _ in range(2):
        for x in DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork"):
            dist.all_reduce(big := torch.ones(200_000))
            assert big[0] == 2 and x.numel() == 8
    child = os.fork()
    if child == 0:
        code = 1
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            code = 0 if "forked" in str(error) else 2
        dist.destroy_process_group()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(big)
    assert big[0] == 4


@body
def threads(rank, size):
    """Groups used from several threads at once."""
    import threading

    problems = []

    def work(group):
        try:
            for i in range(50):
                dist.all_reduce(x := torch.full((1 + i * 100,), float(i)), group=group)
                assert x[-1] == 2 * i
        except Exception as problem:
            problems.append(problem)

    started = [threading.Thread(target=work, args=(group,)) for group in [dist.new_group() for _ in range(4)]]
    for each in started:
        each.start()
    for each in started:
        each.join()
    assert not problems, problems


@body
def mismatch(rank, size):
    both = r"rank 0 called all_reduce\(float32 \[3\], sum\).*rank 1 called all_reduce\(float32 \[4\], sum\)"
    x = torch.ones(3 + rank)
    expect_error(both, lambda: dist.all_reduce(x))
    assert bool((x == 1).all())
    expect_error(both, lambda: dist.all_reduce(x))  # the group cannot be used any more


@body
def late(rank, size):
    patience = datetime.timedelta(milliseconds=600)  # the default is half an hour
    for call in (lambda group: dist.all_reduce(torch.ones(3), group=group),
                 lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait(),
                 lambda group: dist.recv(torch.ones(3), src=1, group=group)):
        group = dist.new_group(timeout=patience)
        if rank == 0:
            took = expect_error(" (Timed out|closed|timeout) ", lambda: call(group))
            assert 0.5 < took < LIMIT / 2, took
        dist.barrier()


@body
def killed(rank, size):
    dist.barrier()
    if rank == 1:
        time.sleep(0.2)
        print("killed", time.monotonic(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    expect_error("rank 1 has ended", lambda: dist.all_reduce(torch.ones(3)))
    print("heard", time.monotonic(), flush=True)


@body
def no_farewell(rank, size):
    """The last operation is not waited for, and the group is not destroyed."""
    dist.all_reduce(torch.ones(10))
    dist.all_reduce(torch.ones(100_000), async_op=True).get_future().then(lambda f: f.value()[0])


@body
def again(rank, size):
    store = dist.FileStore(os.environ["TEST_FOLDER"] + "/another", size)
    for i in range(5):
        dist.destroy_process_group()
        if rank == 0:
            time.sleep(0.1)  # the peer arrives first
        dist.init_process_group("lockstep", store=store, rank=rank, world_size=size)
        if i % 2 == 0:
            dist.all_reduce(x := torch.ones(3))
            assert x[0] == 2


@body
def one_device(rank, size):
    dist.all_reduce(x := torch.ones(3))
    assert x[0] == 2 and dist.get_backend_config() == "cpu:lockstep", dist.get_backend_config()


@body
def named(rank, size):
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    assert module._get_ddp_logging_data()["backend_name"] == "lockstep"
    assert dist.get_backend() == "lockstep" and dist.group.WORLD.name() == "lockstep"


@body
def detail(rank, size):
    """Under TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps the backend."""
    dist.all_reduce(x := torch.ones(3))
    assert x[0] == 2
    wrapper = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
    assert wrapper == "_ProcessGroupWrapper", wrapper


@body
def nothing(rank, size):
    pass


# ---- the tests ----------------------------------------------------------------------------------------------------------


class Backend(ranks.TestCase):
    def test_results_are_those_of_gloo(self):
        with tempfile.TemporaryDirectory() as folder:
            for backend in ("gloo", "lockstep"):
                self.check(run("parity", backend, folder=folder))
            for rank in range(2):
                gloo, ours = (torch.load(f"{folder}/{backend}.{rank}") for backend in ("gloo", "lockstep"))
                for name in gloo:
                    with self.subTest(name, rank=rank):
                        self.assertEqual(len(gloo[name]), len(ours[name]))
                        for theirs, own in zip(gloo[name], ours[name]):
                            torch.testing.assert_close(own, theirs)

    def test_tensors_of_any_strides(self):
        self.check(run("strides"))

    def test_operands_that_cannot_be_right_are_refused(self):
        self.check(run("operands"))

    def test_results_may_be_written_over_what_is_given(self):
        self.check(run("written_over"))

    def test_allocated_tensors_are_tensors_like_others(self):
        self.check(run("allocated"))

    def test_callbacks_may_communicate(self):
        self.check(run("callbacks"))
        self.check(run("patient_callbacks"))

    def test_forked_processes_do_not_disturb(self):
        self.check(run("loaders"))

    def test_threads_with_groups_of_their_own(self):
        self.check(run("threads"))

    def test_calls_that_differ_are_named_on_every_rank(self):
        self.check(run("mismatch"))

    def test_a_timeout_says_so(self):
        self.check(run("late"))

    def test_a_killed_rank_is_heard_of_at_once(self):
        with Lateness() as lateness:
            heard, died = run("killed")
        self.assertEqual(heard[0], 0, heard[1])
        self.assertEqual(died[0], -signal.SIGKILL, died[1])
        at = [float(re.search(r"(?:killed|heard) ([\d.]+)", output)[1]) for _, output in (died, heard)]
        print(f"after {1e3 * (at[1] - at[0]):.0f} ms, a process was {1e3 * lateness.most:.0f} ms late ... ", end="", flush=True)
        self.assertLess(at[1] - at[0], lateness.allowed(1))  # the deadline is half an hour

    def test_a_process_may_end_without_a_word(self):
        for _ in range(3):
            self.check(run("no_farewell"))

    def test_a_group_may_take_the_place_of_one_that_is_gone(self):
        """A store that outlives groups, like torchrun's, keeps no keys of theirs that would mislead later groups."""
        self.check(run("again"))

    def test_a_backend_for_one_device_of_several(self):
        self.check(run("one_device", backend="cpu:lockstep"))

    def test_plain_import_torch_knows_it_and_it_knows_its_name(self):
        self.check(run("named", prefix=from_the_start))

    def test_under_pytorchs_own_checks(self):
        # torch reads the variable when it is imported.
        self.check(run("detail", prefix=from_the_start, TORCH_DISTRIBUTED_DEBUG="DETAIL"))

    def test_ranks_on_two_hosts_are_told(self):
        apart = ["unshare", "--net"]
        if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
            self.skipTest("namespaces cannot be made here")
        for status, output in run("nothing", prefix=lambda rank: apart if rank else []):
            self.assertNotEqual(status, 0)
            self.assertRegex(output, r"(?s)connects processes through shared memory.*rank 0: host.*rank 1: host")


if __name__ == "__main__":
    ranks.main()
