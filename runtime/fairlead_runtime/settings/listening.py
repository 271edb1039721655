"""A listening socket on every address of a machine, of both IP families, for the runtime and the
operator.
"""

import errno
import socket

_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


def listen_on_every_address(port: int, backlog: int) -> socket.socket:
    """One TCP socket for IPv6 and IPv4, for IPv4 alone on a host without IPv6. Raises OSError."""
    try:
        return socket.create_server(
            ("::", port),
            family=socket.AF_INET6,
            backlog=backlog,
            dualstack_ipv6=socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        if error.errno not in _NO_IPV6:
            raise
    return socket.create_server(("0.0.0.0", port), backlog=backlog)  # noqa: S104 - as asked for
