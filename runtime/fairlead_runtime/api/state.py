"""What both ports share: the model's name, its configuration, and the engine once it is loaded.

Owns the one mutable thing of the HTTP face, the step from loading to serving to draining. Starts
nothing.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.api.auth import KeyRing
from fairlead_runtime.api.errors import ApiError
from fairlead_runtime.outputs import Health, ServiceFace
from fairlead_runtime.serving.detokenize import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A loaded model and what answers for it.

    ``metrics`` gives the Prometheus exposition (text format 0.0.4), ``memory`` every sizing term,
    planned and measured, as plain JSON values; both are called on a worker thread. ``died`` is set
    when the engine has given up.
    """

    service: ServiceFace
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    metrics: Callable[[], bytes]
    memory: Callable[[], Mapping[str, Any]]
    died: asyncio.Event


@dataclass(slots=True, kw_only=True)
class Face:
    """The state both apps read. ``attach`` ends loading; ``begin_drain`` ends serving new requests."""

    name: str  # what clients put into "model"
    source: str = ""  # where the model came from, shown by /v1/models
    keys: KeyRing | None = None  # who may call the public port; None: everybody
    created: int = field(default_factory=lambda: int(time.time()))
    model_config: bytes | None = None  # config.json, known before the weights are
    backend: Backend | None = None
    draining: bool = False

    def attach(self, backend: Backend) -> None:
        self.backend = backend
        if self.draining:
            backend.service.begin_drain()

    def begin_drain(self) -> None:
        """Not ready and no new requests from now on; running ones go on. Callable from a signal
        handler.
        """
        self.draining = True
        if self.backend is not None:
            self.backend.service.begin_drain()

    def serving(self) -> Backend:
        """The backend, for a new request. Raises ApiError 503 while loading or draining."""
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down; retry on another replica",
                code="draining",
                headers={"retry-after": "1", "connection": "close"},
            )
        return self.loaded()

    def loaded(self) -> Backend:
        """The backend, draining or not. Raises ApiError 503 while the model loads."""
        if self.backend is None:
            raise ApiError(
                503, "the model is still loading", code="not_ready", headers={"retry-after": "5"}
            )
        return self.backend

    def health(self) -> Health:
        """Loading is alive and not ready; draining is alive and not ready; else what the engine
        says.
        """
        if self.backend is None:
            return Health(alive=True, ready=False, reason="the model is still loading")
        health = self.backend.service.health()
        if self.draining and health.ready:
            return Health(
                health.alive, ready=False, reason="draining", last_step_age=health.last_step_age
            )
        return health
