"""Two hosts on one machine: two network namespaces joined by a veth pair that `tc` shapes to a rate.

Unlike loopback such a link needs time but hardly any processor, so that communication over it can be hidden. Needs
root and iproute2.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_CLONE_NEWNET = 0x40000000  # from linux/sched.h


def missing_for_two_hosts() -> str | None:
    """Say what this machine lacks for two network namespaces and a shaped link, and how to mend it; None if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root: run the command as root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} on the path: install the package iproute2"
    return None


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[Callable[[int], None]]:
    """Make two network namespaces joined by a link of this rate, and yield what moves a rank's process into its own.

    Raises CalledProcessError if the system refuses. The namespaces go with the block, and the link with them; SIGTERM
    ends the block with SystemExit.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    names = [f"fxoverlap{host}-{os.getpid()}" for host in (0, 1)]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        link = [_interface(host) for host in (0, 1)]
        _ip("link", "add", link[0], "netns", names[0], "type", "veth", "peer", "name", link[1], "netns", names[1])
        for host, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", link[host])
            _ip("-n", name, "link", "set", link[host], "up")
            shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "8ms")
            _call("tc", "-n", name, "qdisc", "add", "dev", link[host], *shape)
        yield functools.partial(_enter_host, names)
    finally:
        signal.signal(signal.SIGTERM, before)
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _interface(host: int) -> str:
    return f"fxo{host}"


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _enter_host(names: Sequence[str], rank: int) -> None:
    """Move this process into its namespace and have gloo use the shaped link."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(Path("/run/netns") / names[rank]) as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {names[rank]}")
    os.environ["GLOO_SOCKET_IFNAME"] = _interface(rank)
