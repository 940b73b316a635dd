"""Whole files or none."""

from __future__ import annotations

import os
import threading

import pytest

from persafl_lit.common.atomic_file import write_atomically, write_text_atomically


def test_a_file_that_could_not_be_written_whole_leaves_the_old_one_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def half(file):
        file.write(b"ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_old_file_has_its_name_until_the_new_one_is_whole(tmp_path):
    path, kept = tmp_path / "a.txt", tmp_path / "before.txt"
    path.write_text("old")
    write_atomically(path, lambda file: file.write(b"new"), lambda: kept.write_text(path.read_text()))
    assert (kept.read_text(), path.read_text()) == ("old", "new")


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_bytes()))
    reader.start()
    write_text_atomically(pipe, "words")
    reader.join()
    assert heard == [b"words"]
    assert pipe.is_fifo()


def test_half_characters_are_written_as_question_marks(tmp_path):
    write_text_atomically(tmp_path / "a.txt", "a\ud800b")
    assert (tmp_path / "a.txt").read_bytes() == b"a?b"
