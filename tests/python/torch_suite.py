"""PyTorch's own suite of its distributed package, on gloo and on lockstep, with no GPU.

usage: PYTHONPATH=build/python python tests/python/torch_suite.py [--write docs/evidence/pytorch-suite.md] [--only PATTERN]

The suite is part of PyTorch (torch.testing._internal.distributed.distributed_test) and runs here as PyTorch runs it: each
test in separate processes, which meet through a file. The suite checks the name gloo and skips most of its tests on other
backends, so it gets the name "gloo" while the processes use lockstep. All tests run with 2 ranks, or with as many as they
require, on both backends. The exit status is 1 if a test that passes on gloo does not pass on lockstep: a skip counts as a
failure.
"""

import argparse
import collections
import functools
import json
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

# Python's own refusal: a test that ends with it cannot pass on a backend of another name.
TIED_TO_GLOO = "ValueError: monitored_barrier is only implemented for GLOO backend."
# A subset that takes half a minute: every collective, messages, groups, most forms of
# DistributedDataParallel.
QUICK = """
    test_DistributedDataParallelCPU test_DistributedDataParallelCPU_grad_is_view test_accumulate_gradients_no_sync
    test_accumulate_gradients_no_sync_allreduce_with_then_hook test_all_gather test_all_gather_coalesced_with_empty
    test_all_gather_object_default_pg test_all_reduce_coalesced_full_group_sum test_all_reduce_coalesced_max_complex_unsupported
    test_all_reduce_sum test_all_reduce_sum_async test_barrier_timeout_full_group test_batch_isend_irecv_gloo_tags
    test_broadcast_full_group test_ddp_logging_data_cpu test_destroy_group test_gather test_get_future
    test_grads_same_across_ranks_with_no_sync test_isend test_monitored_barrier_gloo_rank_0_timeout test_reduce_sum_twice
    test_scatter_checks test_scatter_object_list test_send_recv_any_source test_send_recv_with_tag test_sparse_all_reduce_sum
    test_static_graph_api_cpu
""".split()
# These read the suite's own variable for the backend after the decorators have read it, so it must not
# change.
READ_THE_VARIABLE = "test_accumulate_gradients_no_sync"


def prepare():
    """Call it before the suite is imported, here or in a process that this one starts."""
    stand_in = str(pathlib.Path(__file__).resolve().parent / "stand_in")
    if stand_in not in sys.path:
        sys.path.append(stand_in)
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), stand_in])


def tests():
    """Returns the suite's class, created once the environment is set up: here, and in each rank's process."""
    from torch.testing._internal.distributed import distributed_test as suite

    class TorchSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # This process has imported torch, so its children start in 20 ms instead of 5 s.
            context = multiprocessing.get_context("fork")

            def process(target, name, args, kwargs):
                return context.Process(target=enter, name=name, args=(dict(os.environ), args, kwargs))

            self._start_processes(process)

    return TorchSuite


def enter(environment, args, kwargs):
    os.environ.clear()
    os.environ.update(environment)
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test as suite

    suite.INIT_METHOD = os.environ["INIT_METHOD"]  # a new file for each test
    backend = os.environ["TORCH_SUITE_BACKEND"]
    if backend != "gloo" and args[1].startswith(READ_THE_VARIABLE):
        dist.init_process_group = functools.partial(replace_backend, dist.init_process_group, backend)
    else:
        suite.BACKEND = backend
    tests()._run(*args, **kwargs)


def replace_backend(call, name, *args, **kwargs):
    return call(*args, **{**kwargs, "backend": name})


class Outcomes(unittest.TestResult):
    def __init__(self, report):
        super().__init__()
        self.report = report

    def startTest(self, test):
        super().startTest(test)
        self.outcome = "passed", ""

    def addSkip(self, test, reason):
        self.outcome = "skipped", reason

    def addFailure(self, test, error):
        text = self._exc_info_to_string(error, test)
        lines = [line for line in text.splitlines() if line.strip()]
        self.outcome = "failed", TIED_TO_GLOO if TIED_TO_GLOO in text else "\n".join(lines[-12:])

    addError = addFailure

    def addExpectedFailure(self, test, error):
        self.outcome = "passed", "fails as expected"

    def stopTest(self, test):
        super().stopTest(test)
        self.report(test._testMethodName, *self.outcome)


def run_here(backend, ranks, names, report, workers):
    """Runs the tests in `workers` child processes at a time. Returns True if all finished, whatever their outcome."""
    # The suite asks for two GPUs as soon as it sees one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(BACKEND="gloo", TORCH_SUITE_BACKEND=backend, WORLD_SIZE=str(ranks), INIT_METHOD="file://")
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    loader, case = unittest.TestLoader(), tests()
    names = loader.getTestCaseNames(case) if names is None else names

    def run_share(number):
        for name in names[number::workers]:
            case(name).run(Outcomes(report))

    # Tests mostly wait, in steps of 0.1 s.
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_share, args=(number,)) for number in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return all(process.exitcode == 0 for process in processes)


def run(backend, ranks, names=None, show=True, workers=1):
    """Returns {test: (outcome, detail)} from a separate process: the suite reads its settings when it is imported."""
    results = {}
    with tempfile.NamedTemporaryFile("w+") as file:
        command = [sys.executable, __file__, "--backend", backend, "--ranks", str(ranks), "--report", file.name,
                   "--workers", str(workers)]
        if names is not None:
            command += ["--names", *names]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for line in file:
            name, outcome, detail = json.loads(line)
            results[name] = outcome, detail
            if show and outcome == "failed":
                print(f"{backend}, {ranks} ranks: {name} failed\n    " + detail.replace("\n", "\n    "))
    counts = collections.Counter(outcome for outcome, _ in results.values())
    print(f"{backend}, {ranks} ranks: " + ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped")),
          flush=True)
    return results


def wanted_ranks(reason):
    """Returns the number of ranks a test requires, if it was skipped for lack of them."""
    if "small world size" in reason:
        return 8
    match = re.search(r"world size of (\d+)", reason)
    return int(match[1]) if match else 0


def compare(names):
    """Returns [(test, ranks, gloo's outcome, lockstep's outcome)]."""
    gloo, ours = run("gloo", 2, names), run("lockstep", 2, names)
    rows = {name: (name, 2, gloo[name], ours[name]) for name in gloo}
    more = collections.defaultdict(list)
    for name, (outcome, reason) in gloo.items():
        if outcome == "skipped" and wanted_ranks(reason) > 2:
            more[wanted_ranks(reason)].append(name)
    for ranks, those in sorted(more.items()):
        gloo, ours = run("gloo", ranks, those), run("lockstep", ranks, those)
        rows.update({name: (name, ranks, gloo[name], ours[name]) for name in those})
    return [rows[name] for name in sorted(rows)]


def behind(row):
    _, _, gloo, ours = row
    return gloo[0] == "passed" and ours[0] != "passed" and ours[1] != TIED_TO_GLOO


def short(outcome, detail):
    if outcome == "skipped":
        detail = re.sub(r"\s+", " ", detail).replace("|", "/")
        return f"skipped: {detail}" if len(detail) < 90 else f"skipped: {detail[:87]}..."
    return outcome


def table(rows):
    import torch

    passed = lambda at: sum(row[at][0] == "passed" for row in rows)  # noqa: E731
    tied = [row[0] for row in rows if row[2][0] == "passed" and row[3][1] == TIED_TO_GLOO]
    text = f"""# PyTorch's own suite

`tests/python/torch_suite.py` runs the tests of PyTorch {torch.__version__.split("+")[0]} for its distributed package
(`torch.testing._internal.distributed.distributed_test`) on gloo and on lockstep, without a GPU, and writes this page.
Tests run with 2 ranks, or with the number of ranks that they require.

**Of {len(rows)} tests, {passed(2)} pass on gloo and {passed(3)} on lockstep.** """
    if tied:
        text += ("The following tests pass on gloo only, because\n"
                 "`torch.distributed.monitored_barrier` only accepts the backend named gloo:\n"
                 + ",\n".join(f"`{name}`" for name in tied) + ".")
    text += "\n\n| test | ranks | gloo | lockstep |\n|---|---|---|---|\n"
    for name, ranks, gloo, ours in sorted(rows, key=lambda row: (row[2][0] != "passed", row[2][0] == "skipped", row[0])):
        text += f"| {name} | {ranks} | {short(*gloo)} | {'the same' if short(*gloo) == short(*ours) else short(*ours)} |\n"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="PAGE", help="write the table to PAGE")
    parser.add_argument("--quick", action="store_true", help="run a subset, on lockstep only; all tests must pass")
    parser.add_argument("--only", metavar="PATTERN", help="run only the tests whose names match PATTERN")
    for hidden in ("--backend", "--report"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--names", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    prepare()
    sys.argv = sys.argv[:1]  # the suite reads them too
    if options.report:
        # The workers share the file: each row is one write at its end.
        with open(options.report, "ab", buffering=0) as file:
            def report(*row):
                file.write(json.dumps(row).encode() + b"\n")

            return 0 if run_here(options.backend, options.ranks, options.names, report, options.workers) else 1
    if options.quick:
        # of a test; they all end by themselves
        os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "240")
        results = run("lockstep", 2, QUICK, workers=2)
        for name, (outcome, detail) in results.items():
            if outcome != "passed":
                print(f"{name}: {outcome}: {detail}")
        return 0 if all(outcome == "passed" for outcome, _ in results.values()) and len(results) == len(QUICK) else 1
    names = None
    if options.only:
        os.environ.update(BACKEND="gloo", WORLD_SIZE="2")
        names = [n for n in unittest.TestLoader().getTestCaseNames(tests()) if re.search(options.only, n)]
    rows = compare(names)
    if options.write:
        pathlib.Path(options.write).write_text(table(rows), encoding="utf-8")
    lost = [row for row in rows if behind(row)]
    for name, ranks, _, ours in lost:
        print(f"passes on gloo and not on lockstep: {name}, {ranks} ranks: {short(*ours)}")
    print(f"{sum(row[2][0] == 'passed' for row in rows)} passed on gloo, {sum(row[3][0] == 'passed' for row in rows)} on lockstep")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
