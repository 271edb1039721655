"""Logs as one JSON object per line, or as text on a terminal; control characters in text from
outside are escaped.
"""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime

from fairlead_operator.decide.pods.blockers import printable
from fairlead_runtime.settings.terminal import TextFormatter, as_text


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        for name in ("key", "error"):
            if (value := getattr(record, name, None)) is not None:
                line[name] = printable(str(value))
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))[-8000:]
        return json.dumps(line)


def set_up(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if as_text() else JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf would log a line for every watched object.
    logging.getLogger("kopf").setLevel(logging.WARNING)
