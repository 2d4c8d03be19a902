"""The journal: no step is made that it does not know."""

import subprocess
import sys

import pytest

from keras_dpopt.journal import Journal


def test_the_journal_tells_what_was_made_after_a_crash(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write_saved(10)
    journal.write_steps(10, 14, digest=5)
    journal.close()
    with path.open("ab") as file:
        file.write(b"s\0\0\0")  # a torn record: its step was not begun
    journal = Journal(path)
    assert (journal.made, journal.found, journal.digest_at(10)) == (14, 14, 5)
    # In a replay, a save does not forget what is still to be repeated.
    journal.write_steps(10, 12, digest=5)
    journal.write_saved(12)
    assert Journal(path).made == 14
    assert Journal(path).may_replay


def test_the_journal_forgets_steps_that_an_execution_did_not_make(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.write_steps(8, 12, digest=0)
    journal.write_saved(10)  # the epoch ended within the execution
    journal.close()
    assert Journal(tmp_path / "journal").made == 10


def test_steps_that_diverged_are_not_repeated_until_the_next_save(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.write_diverged()
    assert not Journal(tmp_path / "journal").may_replay
    journal = Journal(tmp_path / "journal")
    journal.write_saved(3)
    assert journal.may_replay


def test_only_one_process_has_the_backup(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    code = f"""
import fcntl, sys
try:
    file = open({str(path)!r}, "rb+")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(3)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3
    journal.close()
    with subprocess.Popen(
        [sys.executable, "-c", code + "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout and other.stdout.readline()
        with pytest.raises(RuntimeError, match="Another process"):
            Journal(path)
        other.communicate(b"\n")


def test_a_journal_that_was_taken_over_writes_no_more(tmp_path):
    journal = Journal(tmp_path / "journal")
    Journal(tmp_path / "journal")
    with pytest.raises(RuntimeError, match="taken over"):
        journal.write_steps(0, 1, 0)
