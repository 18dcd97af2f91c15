# SPDX-License-Identifier: Apache-2.0
"""The logger "fusedmoe". FMOE_LOG=debug, info, warning or error in the environment has it write to stderr, from that level on."""

import logging
import os
from collections.abc import Iterator

logger = logging.getLogger("fusedmoe")
LEVELS = "debug", "info", "warning", "error"
_said: set[str] = set()


def say_once(text: str, level: int = logging.WARNING) -> None:
    """One log line, once a process; while torch.compile traces, too."""
    if text not in _said:
        _said.add(text)
        logger.log(level, text)


say_once._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result without the compiler


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 has no StreamHandler[...]
    """Silent where somebody else shows the line: the handlers of a program may come after this one."""

    def emit(self, record: logging.LogRecord) -> None:
        if not any(record.levelno >= h.level for h in _handlers() if h is not self and not isinstance(h, logging.NullHandler)):
            super().emit(record)


def _handlers() -> Iterator[logging.Handler]:
    at: logging.Logger | None = logger
    while at is not None:
        yield from at.handlers
        at = at.parent if at.propagate else None


def _listen() -> None:
    word = os.environ.get("FMOE_LOG", "").lower()
    if word in LEVELS:
        logger.setLevel(word.upper())
        if not logger.handlers:
            handler = _Stderr()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)
    elif word:
        logger.warning("FMOE_LOG=%s is none of %s", word, ", ".join(LEVELS))


_listen()
