"""Several hosts: strangers at the coordinator's port, and a lost host."""

import concurrent.futures
import contextlib
import os
import resource
import select
import signal
import socket
import statistics
import time

import harness
from case import Skip, check_survivors, fault
from harness import Job, KeyFile, TwoHosts, free_port, now, wait_until

FOREVER = 600  # seconds, of a store_probe that is ended when it is no longer needed


def node(case, number, master, key, program, **more):
    command = [case.options.lockstep, "run", "--nnodes", 2, "--node-rank", number, "--master", master,
               "--key-file", key, "-n", case.ranks // 2, "-q", "--prefix", "never", "--join-timeout", "60s", *program]
    return Job(command, **more)


@contextlib.contextmanager
def two_nodes(case, program, port, key, hosts=None):
    """Two launchers of one job; both write into the first one's events."""
    jobs = []
    try:
        master = f"{hosts.addresses[0] if hosts else '127.0.0.1'}:{port}"
        for number in range(2):
            namespace = hosts.names[number] if hosts else None
            jobs.append(node(case, number, master, key, program, namespace=namespace,
                             events=jobs[0].events_file if jobs else None))
        yield jobs
    finally:
        for job in jobs:
            job.end()


def check_work(case, jobs):
    """Every rank's operations on the store still succeed."""
    since = now()

    def all_work():
        return len({e["rank"] for e in jobs[0].events("ops") if e["ops"][0][0] > since}) == case.ranks

    case.check(wait_until(all_work, pause=0.05), "not every rank continues", jobs[0])


def check_unharmed(case, jobs):
    """As check_work; then the job ends when it is asked to, without a failure."""
    check_work(case, jobs)
    jobs[0].signal(signal.SIGTERM)
    for job in jobs:
        status = job.wait()
        case.check(status == 143, f"the status is {status}, not 143: the job did not survive", job)


def idle(port, stop):
    """1,500 silent connections; closed ones are reopened."""
    held = {}
    poll = select.poll()
    while now() < stop:
        while len(held) < 1500 and now() < stop:
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            held[one.fileno()] = one
            poll.register(one, select.POLLIN)
        time.sleep(0.02)
        for fd, _ in poll.poll(0):  # they only ever receive the end of the connection
            poll.unregister(fd)
            held.pop(fd).close()


def shout(texts):
    def attack(port, stop):
        count = 0
        while now() < stop:
            text = texts[count % len(texts)]
            count += 1
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as one:
                one.settimeout(0.02)
                one.sendall(text)
                one.recv(64)
            time.sleep(0.001)

    return attack


HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: scanner\r\n\r\n"
ATTACKS = {
    "random bytes": lambda r: shout([r.randbytes(n) for n in (1, 16, 64, 4096, 65536)]),
    "HTTP": lambda r: shout([HTTP, b"POST /x HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 5000]),
    "a huge length": lambda r: shout([b"\xff" * 8 + b"\0" * 56, b"\xff\xff\xff\x7f" + bytes(60), b"\0" * 64]),
    "1,500 idle connections": lambda r: idle,
}


def attack_in_turns(port, attack, rounds, seconds):
    """Alternates between waiting and attacking; returns the times of the attacks."""
    windows = []
    for _ in range(rounds):
        time.sleep(seconds)
        begin = now()
        # In another process, so that only its use of processor time affects this one.
        attacker = os.fork()
        if attacker == 0:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2)
                attack(port, begin + seconds)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(attacker, 0)[1] != 0:
            raise RuntimeError("the attack itself failed")
        windows.append((begin, begin + seconds))
    return windows


def calm_and_attacked(job, windows):
    """Durations of the store operations outside and inside these windows, in microseconds."""
    rounds = calm_and_attacked_by_round(job, windows)
    return [each for calm, _ in rounds for each in calm], [each for _, attacked in rounds for each in attacked]


def calm_and_attacked_by_round(job, windows):
    """The same of each attack and the pause before it."""
    rounds = [([], []) for _ in windows]
    for begin, micros in (pair for event in job.events("ops") for pair in event["ops"]):
        for (calm, attacked), (b, e) in zip(rounds, windows):
            if begin <= e:
                if begin >= b:
                    attacked.append(micros)
                elif begin + micros / 1e6 < b and not any(end <= begin <= end + 0.2 for _, end in windows):
                    calm.append(micros)
                break
    return rounds


def attack_head(case, kind):
    """The median time of a store operation during the attack over that of the pauses before it."""
    rounds, seconds = (5, 2.0) if case.options.full else (3, 0.6)
    port = free_port()
    with KeyFile(case.options.lockstep) as key, \
            two_nodes(case, [case.options.store_probe, FOREVER], port, key) as jobs:
        jobs[0].await_events("joined", case.ranks)
        # The load of other processes changes from one measurement to the next, so the best one counts, of more rounds
        # where these do not suffice. An agent that waited for strangers would be tens of times slower in each.
        windows, measured = [], []
        for _ in range(4):
            windows += attack_in_turns(port, ATTACKS[kind](case.random), rounds, seconds)
            check_work(case, jobs)
            measured = [(statistics.median(calm), statistics.median(attacked))
                        for calm, attacked in calm_and_attacked_by_round(jobs[0], windows) if calm and attacked]
            best, most = min((during / before for before, during in measured), default=0), case.allowed(1.5)
            if measured and best <= min(most, 3):
                break
        check_unharmed(case, jobs)
        if case.check(measured, "nothing was measured", jobs[0]):
            before, during = map(statistics.median, zip(*measured))
            case.notes.append(f"a set and a get take {before:.0f} us before, {during:.0f} us during")
            case.measure(during / before)
            case.check(best <= min(most, 3), f"store operations take {best:.1f} times as long, in the best of {len(windows)} rounds")


def attack_rows():
    for kind in ATTACKS:
        @fault(f"{kind} at the coordinator's port", "no crash; store operations take at most 1.5 times as long",
               "median time during / before", ranks=(2, 4) if kind.startswith("1,500") else (2,))
        def body(case, kind=kind):
            attack_head(case, kind)


attack_rows()


def knock(port, text):
    """Sends that until it is disconnected; returns the duration and the reply."""
    since = now()
    answer = b""
    with socket.create_connection(("127.0.0.1", port), 60) as one:
        one.sendall(text)
        with contextlib.suppress(ConnectionResetError):
            while got := one.recv(4096):
                answer += got
    return now() - since, answer


@fault("a client without the key", "rejected before anything is parsed, nothing changed", "the client is disconnected",
       1.5, ranks=(2,))
def stranger(case):
    port = free_port()
    with KeyFile(case.options.lockstep) as key, \
            two_nodes(case, [case.options.store_probe, FOREVER], port, key) as jobs:
        jobs[0].await_events("joined", case.ranks)
        # The first frame of a host that proves nothing: its length, its kind, zeros.
        texts = (b"\x40\0\0\0" + bytes(60), bytes(64), b"lockstep", b"")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for seconds, answer in pool.map(lambda text: knock(port, text), texts):
                case.measure(seconds)
                case.check(len(answer) <= 64, f"it was told {len(answer)} bytes: {answer[:80]!r}")
        check_unharmed(case, jobs)


@fault("a host with an old key", "rejected with the reason; the job continues", "the rejected host's end", 5.0, ranks=(2,))
def old_key(case):
    port = free_port()
    with KeyFile(case.options.lockstep) as key, KeyFile(case.options.lockstep) as old:
        with two_nodes(case, [case.options.store_probe, FOREVER], port, key) as jobs:
            jobs[0].await_events("joined", case.ranks)
            late = node(case, 1, f"127.0.0.1:{port}", old, [case.options.store_probe, 1])
            try:
                status = late.wait()
                case.measure((late.ended or now()) - late.started)
                case.check(status not in (0, None), f"the stranger's status is {status}", late)
                case.check("key" in late.text("err"), "the stranger is not told that it is the key", late)
                case.check(not late.events("joined"), "the stranger's rank has joined", late)
            finally:
                late.end()
            check_unharmed(case, jobs)


@fault("kill -9 of a rank, of two hosts", "CommError on every other rank of both hosts that names the dead rank and its pid",
       "the last survivor's error", 1.0)
def kill_of_two_hosts(case):
    reason = harness.why_no_hosts()
    if reason:
        raise Skip(reason)
    for index in range(case.ranks * (5 if case.options.full else 1)):
        rank = index % case.ranks
        phase = ("in_collective", "between")[case.random.randrange(2)]
        with TwoHosts() as hosts, KeyFile(case.options.lockstep) as key:
            with two_nodes(case, [case.options.victim, "--rank", rank, "--phase", phase], 29400, key, hosts) as jobs:
                jobs[0].await_events("training", case.ranks)
                time.sleep(case.random.uniform(0, 0.3))
                pid = jobs[0].rank_pid(rank)
                since = now()
                os.kill(pid, signal.SIGKILL)
                for job in jobs:
                    status = job.wait()
                    case.check(status not in (0, None), f"the status is {status}", job)
                case.measure(check_survivors(case, jobs[0], rank, f"rank {rank} (pid {pid})", since=since))


@fault("a host is lost", "both sides report it", "the last rank's error, on either side", 2.0)
def host_lost(case):
    reason = harness.why_no_hosts()
    if reason:
        raise Skip(reason)
    with TwoHosts() as hosts, KeyFile(case.options.lockstep) as key:
        with two_nodes(case, [case.options.victim], 29400, key, hosts) as jobs:
            jobs[0].await_events("training", case.ranks)
            time.sleep(0.3)
            since = hosts.unplug()
            for job in jobs:
                status = job.wait()
                case.check(status not in (0, None), f"the status is {status}", job)
                case.check("is lost" in job.text("err"), "the launcher does not say that a host is lost", job)
                case.check("does not respond, although its host does" not in job.text("err"), "the launcher says that the host is there", job)
            errors = jobs[0].events("CommError")
            case.check(len(errors) == case.ranks, f"{len(errors)} ranks got a CommError", jobs[0])
            for error in errors:
                case.check("lost" in error["text"], f"not told that a host is lost: {error['text']}")
            if errors:
                case.measure(max(e["t"] for e in errors) - since)
