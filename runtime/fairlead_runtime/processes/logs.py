"""Log lines of the server: one JSON object each, on stderr.

Owns their shape: time, level, logger, message and the fields that a call passes as ``extra``. No
caller passes a prompt or generated text.
"""

import json
import logging
import sys
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str) -> None:
    """Write the lines of every logger at ``level`` and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def adopt_transformers() -> None:
    """Let the lines of transformers, which writes them itself in a form of its own, be as ours."""
    from transformers.utils import logging as theirs

    theirs.disable_default_handler()
    theirs.enable_propagation()
