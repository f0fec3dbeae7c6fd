"""The one kind of tar: every byte follows from names and contents, and nothing else is read."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.archive import (
    BLOCK,
    archive_bytes,
    archive_chunks,
    fault_of_name,
    fault_of_names,
    header,
    read_end,
    read_member,
    shown,
)
from kit.errors import BundleDamaged, BundleRefused

PLAIN = st.from_regex(r"\A[A-Za-z0-9._+=@,~-]{1,12}(/[A-Za-z0-9._+=@,~-]{1,12}){0,3}\Z")
CONTENTS = st.dictionaries(PLAIN, st.binary(max_size=2000), max_size=6)


GOLDEN = "62577ba8fea23363a55f81103f93c2c636aa79d3322e60007ac435debef81076"


def archive_of(files: dict[str, bytes]) -> bytes:
    return b"".join(archive_chunks((n, len(c), [c]) for n, c in sorted(files.items())))


def test_the_bytes_are_these_on_every_machine_and_python() -> None:
    made = archive_of({"run/a.json": b"{}\n", "run/b/c": b"", "image/x": b"x" * 513})
    assert len(made) == 4096
    assert hashlib.sha256(made).hexdigest() == GOLDEN


@given(CONTENTS)
def test_what_is_written_is_read_by_us_and_by_any_tar(files: dict[str, bytes]) -> None:
    if fault_of_names(files):
        return
    made = archive_of(files)
    assert len(made) == archive_bytes(len(c) for c in files.values())
    source = io.BytesIO(made)
    found = {
        name: b"".join(read_member(source, name, len(files[name]), before=(), after=()))
        for name in sorted(files)
    }
    read_end(source)
    assert found == files
    with tarfile.open(fileobj=io.BytesIO(made)) as archive:
        assert {m.name: archive.extractfile(m).read() for m in archive} == files  # type: ignore[union-attr]


@given(st.binary(min_size=512, max_size=512), st.sampled_from(b"0\x001234567LKSgxVMZ"))
def test_any_block_in_a_headers_place_ends_in_one_of_two_errors(raw: bytes, kind: int) -> None:
    """With a checksum that fits, so that its fields are looked at."""
    block = bytearray(raw)
    block[100:156] = (b"0000644\0" * 7)[:56]
    block[156], block[148:156] = kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises((BundleDamaged, BundleRefused)) as caught:
        list(read_member(io.BytesIO(bytes(block)), "run/a", 9, before=(), after=("run/b",)))
    assert caught.value.message.isprintable()


@given(st.text(max_size=120))
def test_a_name_that_passes_stays_inside_on_any_system(name: str) -> None:
    if fault_of_name(name) is None:
        assert len(header(name, 0)) == BLOCK
        assert name.isascii()
        assert not PurePosixPath(name).is_absolute()
        assert PurePosixPath(name).as_posix() == name
        assert not set(name.split("/")) & {"", ".", ".."}
        assert not set(name) & set('\\:*?"<>|\0 ')


@given(PLAIN)
def test_plain_names_pass(name: str) -> None:
    assert (fault_of_name(name) is None) == (not set(name.split("/")) & {".", ".."})


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\\b", "C:x", "a\0b", "ü",
     "a b", "\x1b[31m", "\u202e", "a" * 101, "-/..", "\ufb01"],
)  # fmt: skip
def test_other_names_do_not(name: str) -> None:
    assert fault_of_name(name) is not None


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a/b", "a/b"], "a/b: there twice"),
        (["a/Readme", "a/README"], "a/README: the same file as a/Readme"),
        (["a", "a/b"], "a: a file, and a folder of a/b"),
        (["A", "a/b"], "A: a file, and a folder of a/b"),
        (["a/b", "c/../d"], "c/../d: a path that leaves"),
    ],
)
def test_names_that_would_overwrite_each_other_are_named(names: list[str], said: str) -> None:
    assert said in str(fault_of_names(names))


@given(st.text())
def test_what_is_shown_of_a_hostile_text_is_harmless(text: str) -> None:
    assert shown(text).isascii()
    assert shown(text).isprintable()
    assert len(shown(text)) <= 123
