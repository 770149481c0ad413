"""The private folder of a running server: it holds sockets and rendezvous files, and a lock marks it as in use.

The lock is the kernel's (flock), so it ends with the server however that ends; the next start deletes folders left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from srt.utils.errors import StartError

PREFIX = "srt-"
ADDRESS_FILE = "address"  # where HTTP is served, if it is
_UNLOCKED = ".srt-new-"  # name until the lock is held, so that no sweep takes the folder for a dead server's
_LOCK = "lock"
_LONGEST_PATH = 107  # bytes: the kernel's limit for a socket's path
_ROOM_FOR_NAMES = 16


class RunDir:
    """A new folder with mode 0700, deleted by `remove`. Its lock is held until then, or until the process ends."""

    def __init__(self, parent: Path | None = None) -> None:
        self._lock_fd = self._folder_fd = -1
        try:
            parent = parent or Path(tempfile.gettempdir())
            sweep(parent)
            self._make(parent)
        except OSError as error:
            where = f"The temporary folder {parent}" if parent else "No temporary folder"
            cannot = "cannot" if parent else "can"
            raise StartError(f"{where} {cannot} be used ({error.strerror}): set TMPDIR to another one.") from error
        if len(os.fsencode(self.path)) + _ROOM_FOR_NAMES > _LONGEST_PATH:
            self.remove()
            raise StartError(
                f"The temporary folder {parent} has too long a name for sockets: set TMPDIR to a shorter one."
            )

    def _make(self, parent: Path) -> None:
        """Make the folder, with its lock held. A failure leaves nothing behind."""
        fresh = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=parent))
        try:
            self._lock_fd = os.open(fresh / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            # systemd-tmpfiles deletes old folders, but not one that is itself locked.
            self._folder_fd = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._folder_fd, fcntl.LOCK_EX)
            self.path = fresh.with_name(PREFIX + fresh.name.removeprefix(_UNLOCKED))
            fresh.rename(self.path)
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
            self._unlock()
            raise

    def remove(self) -> None:
        """Delete the folder and release the lock; a second call does nothing."""
        if self._lock_fd < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        for fd in (self._lock_fd, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._folder_fd = -1


def sweep(parent: Path) -> list[Path]:
    """Delete the folders under `parent` that servers of this user left behind; those in use stay. Returns what was deleted."""
    with contextlib.suppress(OSError):
        return [path for path in sorted(parent.glob(PREFIX + "*")) if _is_ours(path) and _remove_if_unlocked(path)]
    return []


def is_in_use(path: Path) -> bool:
    """Return whether a server of this user runs in this folder."""
    if not _is_ours(path):
        return False
    try:
        lock_fd = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock_fd)
    return False


def _is_ours(path: Path) -> bool:
    """Return whether this is a real folder, private to this user: a link prepared by another user would lead the sweep astray."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700


def _remove_if_unlocked(path: Path) -> bool:
    try:
        lock_fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # not a server's folder
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(lock_fd)


@contextlib.contextmanager
def must_be_written(path: Path) -> Iterator[None]:
    """Turn a failed write into StartError: the server needs this file."""
    try:
        yield
    except OSError as error:
        raise StartError(f"{path} cannot be written ({error.strerror}): set TMPDIR to another folder.") from error
