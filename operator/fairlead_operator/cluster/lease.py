"""Leader election by one Lease: at any moment at most one operator writes.

Reads its own monotonic clock alone. A holder stops writing well before others may take over, and
stands down when another process changed the Lease, even if the Lease names it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from fairlead_operator.errors import ApiError
from fairlead_operator.resource.kinds import GROUP, LEASE, MANAGER, Key, Kind, Object

log = logging.getLogger(__name__)

SERVES = f"{GROUP}/serves"  # annotation of the Lease: the holder's scope
DURATION = 15.0  # a Lease without renewal for this long is free
RENEW = 5.0  # a holder renews this often
FENCE = 10.0  # and stops writing when its last renewal is older than this
# Remembered writes: an API server that hung may commit the first of them hours later.
ATTEMPTS = 4096


class LeaseApi(Protocol):
    """The two calls the election needs; ``Cluster`` has them."""

    async def get(self, kind: Kind, key: Key) -> Object | None: ...

    async def write_lease(self, kind: Kind, key: Key, lease: Object) -> Object: ...


@dataclass(slots=True)
class _Observation:
    """A version of the Lease and when this process first saw it."""

    version: str
    at: float


class Election:
    """Leader election: ``step`` is one read and at most one write; ``holds`` is the fence of every
    other write.
    """

    def __init__(
        self,
        api: LeaseApi,
        namespace: str,
        identity: str,
        *,
        serves: str = "",
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api, self._key, self.identity = api, (namespace, MANAGER), identity
        self._serves = serves
        self._clock, self._now = clock, now
        self._mine: Object | None = None
        self._renewed = float("-inf")
        self._terms = 0  # how often this process began to hold the Lease, after a lapse too
        self._attempts: deque[str] = deque(maxlen=ATTEMPTS)  # since the last good answer
        self._observation: _Observation | None = None
        self._first = True
        self._warned_of = ""  # the holder

    def holds(self) -> bool:
        """Whether this process may write right now."""
        return self._mine is not None and self._clock() - self._renewed < FENCE

    async def step(self) -> None:
        """Renew, take over or read. Errors of the API server change nothing."""
        began = self._clock()
        if self._mine is not None:
            await self._write(self._mine, began)
            return
        lease = await self._api.get(LEASE, self._key)
        if lease is None or self._is_free(lease):
            await self._write(lease, began)
        else:
            self._warn_of_another_release(lease)
        self._first = False

    async def run(self, report: Callable[[bool], None], beat: float = RENEW) -> None:
        """Hold the Lease or try to until cancelled; ``report`` is called at every change, and after
        a lapse that ended before anyone looked: what was left out in it has to be done now.
        """
        leading, terms = False, 0
        while True:
            try:
                await self.step()
            except Exception as error:  # noqa: BLE001 - whatever the API server does, the election goes on
                log.warning("lease: %s", str(error)[:1024])
            if (self.holds(), self._terms) != (leading, terms):
                leading, terms = self.holds(), self._terms
                log.info("leading as %s" if leading else "no longer leading as %s", self.identity)
                report(leading)
            await asyncio.sleep(beat if leading else min(beat, 2.0))

    async def release(self) -> None:
        """Give the Lease up at the end, so that a standby need not wait for it to expire."""
        if self._mine is None:
            return
        lease, self._mine = self._mine, None
        spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
        await self._api.write_lease(LEASE, self._key, {**lease, "spec": spec})

    def _warn_of_another_release(self, lease: Object) -> None:
        """Warn once per holder that an operator of another scope keeps this one from serving its
        own.
        """
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        serves = (lease["metadata"].get("annotations") or {}).get(SERVES)
        if serves in {None, self._serves} or holder == self._warned_of:
            return
        self._warned_of = holder
        log.warning(
            "the Lease %s/%s is held by %s, which serves %s; this operator serves %s and waits: "
            "install the second release in a namespace of its own",
            *self._key,
            holder,
            serves,
            self._serves,
        )

    def _is_free(self, lease: Object) -> bool:
        """Whether the Lease can be taken: it has no holder, is expired by our clock, or is our own
        from before a restart.
        """
        spec = lease.get("spec") or {}
        version = lease["metadata"]["resourceVersion"]
        if self._observation is None or self._observation.version != version:
            self._observation = _Observation(version, self._clock())
        holder = spec.get("holderIdentity") or ""
        if not holder or (
            holder == self.identity and (self._first or spec.get("renewTime") in self._attempts)
        ):
            return True
        duration = float(spec.get("leaseDurationSeconds") or DURATION)
        return self._clock() - self._observation.at > duration

    async def _write(self, lease: Object | None, began: float) -> None:
        # Unique to the microsecond, so that a write whose answer was lost is recognised as our own.
        stamp = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._attempts.append(stamp)
        meta: Object = (
            lease["metadata"] if lease else {"name": self._key[1], "namespace": self._key[0]}
        )
        if self._serves:
            annotations = {**(meta.get("annotations") or {}), SERVES: self._serves}
            meta = {**meta, "annotations": annotations}
        spec = dict((lease or {}).get("spec") or {})
        if spec.get("holderIdentity") != self.identity:
            spec["acquireTime"] = stamp
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if lease else 0)
        spec |= {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(DURATION),
            "renewTime": stamp,
        }
        body = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": meta, "spec": spec}
        try:
            mine = await self._api.write_lease(LEASE, self._key, body)
            self._terms += not self.holds()
            self._mine = mine
            self._renewed = began
            self._attempts = deque(
                [stamp], ATTEMPTS
            )  # the Lease has a newer version: no earlier write can still be committed
        except ApiError as error:
            if error.code in {
                404,
                409,
            }:  # it changed since our last write: by another process, or our answer was lost
                self._mine = None
            raise
