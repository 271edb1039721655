"""Addresses for pods on the loopback device: one each, so that all pods can use the same ports.

Owns adding and removing them, and where the tests run: here, or in their own user and network
namespace when this process may not add addresses. That namespace has only a loopback device, so
downloads must happen before.
"""

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from typing import Literal

MARK = "FAIRLEAD_TESTS_IN_NAMESPACE"  # set in a run that was restarted in a namespace
FIX = (
    "run as root, or where `unshare -rn ip link set lo up` works "
    "(user namespaces, util-linux and iproute2)"
)
PROBE = "10.249.255.254/32"
ADDRESSES = 62_500
TAKEN = re.compile("File exists|already assigned")  # by older and newer versions of ip
_numbers = count(secrets.randbelow(ADDRESSES))


class NoAddressError(RuntimeError):
    """Addresses cannot be added to the loopback device."""


def take() -> str:
    """Add an unused address: parallel test runs share the device. Raises NoAddressError."""
    while True:
        number = next(_numbers) % ADDRESSES
        address = f"10.249.{number // 250}.{number % 250 + 1}"
        ok, output = _run("ip", "address", "add", f"{address}/32", "dev", "lo")
        if ok:
            return address
        if not TAKEN.search(output):
            raise NoAddressError(
                f"pods of the tests need addresses of their own: {FIX}; ip said: {output}"
            )


def release(address: str) -> None:
    _run("ip", "address", "del", f"{address}/32", "dev", "lo")


def may_add() -> bool:
    """Whether this process may add addresses to the loopback device."""
    ok, _ = _run("ip", "address", "replace", PROBE, "dev", "lo")
    if ok:
        _run("ip", "address", "del", PROBE, "dev", "lo")
    return ok


def may_unshare() -> bool:
    """Whether this process may create namespaces in which it may add addresses."""
    return _run(*inside(["true"]))[0]


def inside(command: Sequence[str]) -> list[str]:
    """This command in its own user and network namespace, with the loopback device up."""
    return ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def where_to_run(*, add: bool, inside_already: bool, unshare: bool) -> Literal["here", "inside"]:
    """Where the tests run. ``inside_already``: in the namespace now. Raises NoAddressError."""
    if add:
        return "here"
    if inside_already:
        raise NoAddressError(f"no addresses for pods, even in a namespace of the tests' own: {FIX}")
    if not unshare:
        raise NoAddressError(
            f"no addresses for pods, neither here nor in a namespace of the tests' own: {FIX}"
        )
    return "inside"


def ensure_addresses() -> None:
    """Return when addresses can be added; else replace this process by the same command in a
    namespace where they can.
    """
    add = may_add()
    if (
        where_to_run(add=add, inside_already=MARK in os.environ, unshare=add or may_unshare())
        == "inside"
    ):
        command = inside([sys.executable, *sys.orig_argv[1:]])
        print(
            "[addresses] not root: restarting the tests under `unshare -rn`",
            file=sys.stderr,
            flush=True,
        )
        os.execvpe(command[0], command, {**os.environ, MARK: "1"})


def _run(*command: str) -> tuple[bool, str]:
    """Whether the command succeeded, and its error output if not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return False, f"{command[0]} is not installed"
    return done.returncode == 0, done.stderr.strip() if done.returncode else ""
