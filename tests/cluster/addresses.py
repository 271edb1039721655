"""Addresses for pods on the loopback device: one each, so that every pod has the same ports.

Owns adding and removing them.
"""

import subprocess
from itertools import count

_numbers = count(1)


class NoAddressError(RuntimeError):
    """Addresses cannot be added to the loopback device."""


def take() -> str:
    """A fresh address; the tests' processes bind to it and to nothing else. Raises NoAddressError."""
    number = next(_numbers)
    address = f"10.249.{number // 250}.{number % 250 + 1}"
    done = subprocess.run(
        ["ip", "address", "replace", f"{address}/32", "dev", "lo"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NoAddressError(
            "pods of the tests need addresses of their own: run as root, or in a namespace of your own "
            f"(unshare -rn sh -c 'ip link set lo up; make test'); ip said: {done.stderr.strip()}"
        )
    return address


def release(address: str) -> None:
    subprocess.run(["ip", "address", "del", f"{address}/32", "dev", "lo"], capture_output=True, check=False)
