"""What one pod takes in at most: connections, requests, prompts that wait, bodies, open files.

Owns these bounds, what binds each of them, and their bytes of host memory. Pure: the operator, the
engine and the HTTP process solve the same equations, each with what it knows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.arithmetic import ceil_div

# Of the public port, at least: more than run and wait by default, so that a full queue can answer.
CONNECTIONS = 2048
SPARE_CONNECTIONS = 256  # beside requests that run and wait: to answer those that are refused
ADMIN_CONNECTIONS, HANDSHAKES = 2048, 1024
OWN_FILES = 256  # of the HTTP process beside connections
LEAST_FILES = 2 * OWN_FILES  # with fewer no HTTP server starts
SIDE_SHARE = 8  # of too few files the admin port and handshakes get one part in so many each
# Of a stream, in the HTTP process and the kernel; what TLS takes more.
CONNECTION_BYTES, TLS_BYTES = 40 << 10, 96 << 10
BODY, ALL_BODIES = 2 << 20, 64 << 20  # bytes of a body, at least, and of all that are read
BODY_TOKEN = 16  # bytes of a token: text in JSON of any script, or an id of up to 14 digits
PARSED = 20  # bytes of memory for a byte of the body that is parsed: a list of small ids
# Tokens that may wait for each request that may wait or run, at least, and bytes of all: no more
# than one part in MEMORY_SHARE of the memory that a CPU's cache is in.
PROMPT_TOKENS, ALL_PROMPTS, MEMORY_SHARE = 1024, 256 << 20, 64
# Of a token that waits, its id in both processes; of its block, a digest.
WAITING_TOKEN_BYTES, WAITING_DIGEST_BYTES = 8, 32
DEFAULT_QUEUE = EngineConfig().max_queue
QUEUED_CHOICES = 8  # that may wait for each request that may wait: what they take is counted so


@dataclass(frozen=True, slots=True)
class Bound:
    """The most of something. ``reason``: the arithmetic of what binds, with the names of settings
    in braces.
    """

    most: int
    reason: str

    def text(self, name: Callable[[str], str] = str) -> str:
        """``reason`` in words. ``name``: how the reader knows a setting."""
        fields = ("max_requests", "max_queue", "max_model_len")
        return self.reason.format(**{field: name(field) for field in fields})


def least(*bounds: Bound) -> Bound:
    """The bound that binds of several that all hold; the first of equal ones."""
    return min(bounds, key=lambda bound: bound.most)


def greatest(*bounds: Bound) -> Bound:
    """The bound that counts of several of which one is enough; the first of equal ones."""
    return max(bounds, key=lambda bound: bound.most)


def waiting_tokens(max_queue: int, rows: int, longest: int, memory: int | None = None) -> Bound:
    """Prompt tokens that may wait together, those of preempted sequences included.

    ``rows`` may run, ``longest`` is a sequence's length in tokens. ``memory``: bytes of the
    host that the plan may use, where the cache is in them.
    """
    requests = f"({{max_queue}} {max_queue} + {{max_requests}} {rows})"
    room, source = ALL_PROMPTS, f"{ALL_PROMPTS >> 20} MiB"
    if memory is not None and memory // MEMORY_SHARE < room:
        room = memory // MEMORY_SHARE
        source = f"1/{MEMORY_SHARE} of {memory >> 20} MiB of memory"
    return least(
        Bound((max_queue + rows) * longest, f"{requests} * {longest} tokens of {{max_model_len}}"),
        greatest(
            Bound(room // WAITING_TOKEN_BYTES, f"{source} / {WAITING_TOKEN_BYTES} bytes a token"),
            Bound((max_queue + rows) * PROMPT_TOKENS, f"{requests} * {PROMPT_TOKENS} tokens"),
        ),
    )


def waiting_token_bytes(block_size: int) -> int:
    """Host memory that a token of a waiting prompt takes, with its part of its block's digest."""
    return WAITING_TOKEN_BYTES + ceil_div(WAITING_DIGEST_BYTES, block_size)


def body_bytes(longest: int) -> Bound:
    """Bytes of one body, with a prompt of ``longest`` tokens as text or ids."""
    return least(
        Bound(ALL_BODIES, "all bodies that are read"),
        greatest(
            Bound(BODY, "at least"),
            Bound(longest * BODY_TOKEN, f"{longest} tokens of {{max_model_len}} * {BODY_TOKEN}"),
        ),
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bounds of one pod. ``connections``: of the public port, where its file limit allows
    them. ``requests`` run or wait, one choice each. ``body`` in bytes, as ``token_bytes``: what a
    waiting token takes, with its part of its block's digest.
    """

    connections: Bound
    requests: Bound
    waiting_tokens: Bound
    body: Bound
    token_bytes: int
    tls: bool  # of the public port

    @classmethod
    def of(cls, config: EngineConfig, longest: int, memory: int | None = None) -> Self:
        """Solve for sequences of ``longest`` tokens; ``memory`` as ``waiting_tokens`` takes it."""
        rows, queue = config.max_rows, config.max_queue
        requests = f"{{max_requests}} {rows} + {{max_queue}} {queue}"
        return cls(
            connections=public_connections(config),
            requests=Bound(rows + queue, requests),
            waiting_tokens=waiting_tokens(queue, rows, longest, memory),
            body=body_bytes(longest),
            token_bytes=waiting_token_bytes(config.block_size),
            tls=bool(config.ssl_certfile),
        )

    @property
    def files(self) -> int:
        """Files that the HTTP process may have open."""
        return files_of(self.connections.most)

    @property
    def full_queue_tokens(self) -> int:
        """Prompt tokens a request up to which requests fill the queue; with more, tokens do."""
        return self.waiting_tokens.most // self.requests.most

    @property
    def waiting_bytes(self) -> int:
        """Host memory of the prompts that wait."""
        return self.waiting_tokens.most * self.token_bytes

    @property
    def http_bytes(self) -> int:
        """Host memory of connections and bodies, beyond that which every pod reserves."""
        connections, body = self.connections.most, self.body.most - BODY
        tls = connections * TLS_BYTES if self.tls else 0
        return (connections - CONNECTIONS) * CONNECTION_BYTES + tls + body * PARSED

    @property
    def host_bytes(self) -> int:
        """Host memory of all of it, beyond that which every pod reserves."""
        return self.waiting_bytes + self.http_bytes

    def bounds(self) -> dict[str, Bound]:
        """All bounds by name, as reports and ``plan`` show them."""
        files = Bound(self.files, "the connections of both ports, handshakes, and our own")
        return {
            "connections": self.connections,
            "requests": self.requests,
            "waitingPromptTokens": self.waiting_tokens,
            "bodyBytes": self.body,
            "openFiles": files,
        }


def public_connections(config: EngineConfig) -> Bound:
    """Connections of the public port: every request may come on one of its own."""
    rows, queue = config.max_rows, config.max_queue
    return greatest(
        Bound(CONNECTIONS, "at least"),
        Bound(
            rows + queue + SPARE_CONNECTIONS,
            f"{{max_requests}} {rows} + {{max_queue}} {queue} + {SPARE_CONNECTIONS}",
        ),
    )


def surplus_queue(config: EngineConfig, longest: int, memory: int) -> int:
    """Bytes of host memory that a longer ``max_queue`` than the default takes more."""
    default = replace(config, max_queue=min(config.max_queue, DEFAULT_QUEUE))
    of = Traffic.of
    return of(config, longest, memory).host_bytes - of(default, longest, memory).host_bytes


def files_of(connections: int) -> int:
    """Files of the HTTP process with so many connections on the public port."""
    return connections + ADMIN_CONNECTIONS + HANDSHAKES + OWN_FILES


class PortBounds(NamedTuple):
    """Connections of the public and of the admin port, and TLS handshakes at a time."""

    public: Bound
    admin: int
    handshakes: int

    @classmethod
    def within(cls, files: int | None, public: Bound) -> Self:
        """What ``files`` that the process may open, LEAST_FILES or more, leave of ``public``; None:
        no limit.
        """
        if files is None or files_of(public.most) <= files:
            return cls(public, ADMIN_CONNECTIONS, HANDSHAKES)
        left = files - OWN_FILES
        admin, handshakes = (
            min(most, left // SIDE_SHARE) for most in (ADMIN_CONNECTIONS, HANDSHAKES)
        )
        room = Bound(left - admin - handshakes, f"RLIMIT_NOFILE is {files}")
        return cls(least(public, room), admin, handshakes)

    @property
    def files(self) -> int:
        """Files that the process opens at most."""
        return self.public.most + self.admin + self.handshakes + OWN_FILES
