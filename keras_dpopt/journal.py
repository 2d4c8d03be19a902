"""The journal of a backup: each step is written down before it is made."""

import fcntl
import os
import pathlib
import struct
import weakref

_RECORD = struct.Struct("<cqqq")
_STEPS, _SAVED, _DIVERGED = b"s", b"b", b"d"

# A callback that was interrupted leaves its journal open; whoever resumes in the same
# process takes the directory over.
_OPEN: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


class Journal:
    """A file of records, opened by one process at a time and only appended to.

    Args:
        path: The file; made if it is not there, with mode 0600.

    Attributes:
        made: Number of the release up to which steps may have been made.
        may_replay: Whether these steps may be made again, for all that is known here.

    Raises:
        RuntimeError: if another process has it open.
    """

    def __init__(self, path: pathlib.Path):
        self._name = os.path.realpath(path)
        if (other := _OPEN.get(self._name)) is not None:
            other.close()
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, mode=0o600)
        os.fchmod(self._file, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RuntimeError(
                f"Another process is training with the backup in {path.parent}. Two "
                "runs with the same keys would draw the same noise. Stop the other "
                "process, or use a directory of your own."
            ) from None
        except OSError:
            pass  # a file system without locks
        _OPEN[self._name] = self
        self.made = 0
        self.may_replay = True
        self._digests: dict[int, int] = {}
        content = path.read_bytes()
        whole = len(content) - len(content) % _RECORD.size
        # A torn record at the end: its step was not begun.
        os.ftruncate(self._file, whole)
        for record in _RECORD.iter_unpack(content[:whole]):
            self._take(*record)
        # These were made by earlier runs.
        self.found = self.made

    def _take(self, kind: bytes, first: int, last: int, digest: int) -> None:
        if kind == _STEPS:
            self.made = max(self.made, last)
            self._digests[first] = digest
        elif kind == _SAVED:
            self.made, self.may_replay = last, True
        else:
            self.may_replay = False

    def digest_at(self, release: int) -> int | None:
        """Returns the digest that was written before this release, if any."""
        return self._digests.get(release)

    def write_steps(self, first: int, last: int, digest: int) -> None:
        """Writes that releases `first` to `last` - 1 are about to be made.

        Args:
            first: Number of the next release.
            last: Number of the one after the last that can come.
            digest: Digest of the state before them.
        """
        if last > self.found:
            self._append(_STEPS, first, last, digest)

    def write_saved(self, release: int) -> None:
        """Writes that the state before `release` was saved."""
        self._append(_SAVED, release, max(self.found, release), 0)

    def write_diverged(self) -> None:
        """Writes that the steps that were made cannot be repeated."""
        self._append(_DIVERGED, 0, 0, 0)

    def _append(self, *record) -> None:
        if self._file is None:
            raise RuntimeError(
                "The backup directory was taken over by another training. Give each "
                "training a directory of its own."
            )
        os.lseek(self._file, 0, os.SEEK_END)
        os.write(self._file, _RECORD.pack(*record))
        os.fdatasync(self._file)
        self._take(*record)

    def close(self) -> None:
        """Closes the file and gives up the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            _OPEN.pop(self._name, None)

    def __del__(self):
        if getattr(self, "_file", None) is not None:
            self.close()
