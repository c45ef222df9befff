"""The log of a mount: lines for people or JSON for machines, in a file that is turned over, or on stderr."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
from typing import Any

from curvfs.errors import UsageError
from mount.options import LOG_JSON, MountOptions

_LOG_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, pid, message, and a traceback where there is one."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time_ms": round(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(options: MountOptions, *, quiet: bool = False) -> None:
    """Log as the options say: to a file that is turned over, to stderr, or (``quiet``) nowhere. Raises UsageError."""
    handler: logging.Handler
    if options.log_file is not None:
        try:
            handler = logging.handlers.RotatingFileHandler(
                options.log_file, maxBytes=options.log_size_bytes, backupCount=options.log_keep
            )
            os.chmod(options.log_file, 0o600)
        except OSError as error:
            raise UsageError(f"The log file {options.log_file} cannot be written: {error.strerror}.") from error
    elif quiet:
        handler = logging.NullHandler()
    else:
        handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if options.log_format == LOG_JSON else logging.Formatter(_LOG_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    to_terminal = options.log_file is None and not quiet
    root.setLevel(logging.DEBUG if options.debug else logging.WARNING if to_terminal else logging.INFO)
    logging.getLogger("pyfuse3").setLevel(logging.INFO if options.debug else logging.WARNING)
