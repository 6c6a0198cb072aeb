"""Ports for tests that run in parallel."""

import pathlib
import random
import socket

# Ports above these are used by other programs of these tests.
FIRST, LAST = 10000, 19999


reserved = []  # sockets that keep the ports of this process


def reserve(port):
    """Reserves the port for this process; true on success. tests/support/process.cpp reserves with the same name."""
    sign = socket.socket(socket.AF_UNIX)
    try:
        sign.bind(f"\0lockstep-test-port-{port}")
    except OSError:
        sign.close()
        return False
    reserved.append(sign)
    return True


def is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port():
    """A port of 127.0.0.1 that is unused. It is outside of the system's ephemeral range, so that no
    other program gets it by chance, and no other test reserves it while this process lives."""
    own = range(FIRST, LAST + 1)
    try:
        low, high = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        own = [port for port in own if not low <= port <= high] or own
    except OSError:
        pass
    chosen = random.SystemRandom()
    return next(port for port in iter(lambda: chosen.choice(own), None) if reserve(port) and is_free(port))
