"""Folders in which one process works at a time. The system lets go of them when that process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: File systems that know no locks say so in these ways. Whoever has one must see to it that processes keep apart.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Make the folder and keep other processes out of it; False when one is in it already."""
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(folder) as descriptor:
        try:
            _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        # Its last owner may have renamed or removed it since it was opened.
        yield folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Wait until no other process is in the folder, which exists and stays."""
    with _opened(folder) as descriptor:
        _lock(descriptor, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, operation: int) -> None:
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
