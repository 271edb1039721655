"""Log lines of the server, on stderr: one JSON object each, or text on a terminal.

Owns their shape: time, level, logger, message and the fields that a call passes as ``extra``. No
caller passes a prompt or generated text.
"""

import json
import logging
import sys
from datetime import UTC, datetime

from fairlead_runtime.settings import terminal


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= terminal.extras(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str, log_format: str) -> None:
    """Write the lines of every logger at ``level`` and above to stderr, in one of LOG_FORMATS."""
    terminal.use(log_format)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(terminal.TextFormatter() if terminal.as_text() else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def adopt_transformers() -> None:
    """Let the lines of transformers, which writes them itself in a form of its own, be as ours."""
    from transformers.utils import logging as theirs

    theirs.disable_default_handler()
    theirs.enable_propagation()
