"""The messages between rank 0 and the other ranks. Imports no torch, as ``step_messages``."""

from fairlead_runtime.child.frames import Codec, Message
from fairlead_runtime.device.ranks.step_messages import Copies, Forward
from fairlead_runtime.serving.wire import Refused
from fairlead_runtime.settings.engine_config import EngineConfig


class Start(Message):
    """The first message to a rank: load its shard of the model in this directory. ``threads``:
    those that it may compute with on a CPU; ``level`` and ``log_format`` of
    logging.
    """

    rank: int
    path: str
    config: EngineConfig
    threads: int
    level: int
    log_format: str


class Sizes(Message):
    """Allocate the cache. From then on the rank follows the leader's steps. ``tables``: rows and
    blocks of the block tables on the leader's device, if it keeps them there.
    """

    units: int
    block_size: int
    host_units: int
    tables: tuple[int, int] | None


ToRank = Start | Sizes | Copies | Forward


class Loaded(Message):
    """The rank is about to meet the others."""


class Measured(Message):
    """Bytes by name."""

    sizes: dict[str, int]


class Allocated(Message):
    """``not_pinned``: why the host memory of the cache is not pinned; empty if it is."""

    not_pinned: str


FromRank = Loaded | Measured | Allocated | Refused

TO_RANK: Codec[ToRank] = Codec(ToRank)
FROM_RANK: Codec[FromRank] = Codec(FromRank)
