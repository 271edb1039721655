"""The IP families of this machine, and a machine that has no IPv6."""

import socket
from typing import Any

import pytest


def loopbacks() -> list[str]:
    """The loopback addresses of this machine, one for each of its IP families."""
    addresses = ["127.0.0.1"]
    if socket.has_dualstack_ipv6():
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            return addresses
        addresses.append("::1")
    return addresses


def without_ipv6(monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    """Let every IPv6 socket fail with this error number, as where the kernel has no IPv6."""
    create = socket.create_server

    def refusing(address: tuple[str, int], **options: Any) -> socket.socket:
        if options.get("family") == socket.AF_INET6:
            raise OSError(reason, "no IPv6")
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", refusing)
