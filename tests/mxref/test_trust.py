"""Which folders other users could change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mxref import trust
from mxref.trust import read_trusted, why_untrusted

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no user ids")
STRANGER = 54321


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    below = tmp_path / "above" / "folder"
    below.mkdir(parents=True)
    return below


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a path belong to another user, in the eyes of the module: only root could really give it away."""
    real, stranger = os.stat_result, path.stat()
    where = (stranger.st_dev, stranger.st_ino)

    def seen(found: os.stat_result) -> os.stat_result:
        if (found.st_dev, found.st_ino) != where:
            return found
        return real([*found[:4], STRANGER, *found[5:10]])

    stat, fstat = Path.stat, os.fstat
    monkeypatch.setattr(Path, "stat", lambda self, **options: seen(stat(self, **options)))
    monkeypatch.setattr(os, "fstat", lambda handle: seen(fstat(handle)))


def test_a_folder_of_ones_own_is_trusted(folder: Path) -> None:
    assert why_untrusted(folder) == ""
    folder.chmod(0o700)
    assert why_untrusted(str(folder)) == ""


@pytest.mark.parametrize("part", ["", ".."])
def test_what_others_can_write_is_not(folder: Path, part: str) -> None:
    changed = (folder / part).resolve()
    changed.chmod(0o757)
    assert why_untrusted(folder) == f"{changed} can be written by every user"


def test_the_sticky_bit_protects_what_is_below_and_not_the_folder_itself(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert why_untrusted(folder) == ""
    assert why_untrusted(folder.parent) == f"{folder.parent} can be written by every user"


@pytest.mark.parametrize("mode", [0o755, 0o1777])
@pytest.mark.parametrize("part", ["", ".."])
def test_what_belongs_to_another_user_is_not(
    folder: Path, part: str, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = (folder / part).resolve()
    changed.chmod(mode)
    give_away(changed, monkeypatch)
    assert why_untrusted(folder) == f"{changed} belongs to user {STRANGER}"


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a folder away"
)
def test_root_does_not_trust_the_folder_of_another_user(folder: Path) -> None:
    os.chown(folder, STRANGER, -1)
    assert why_untrusted(folder) == f"{folder} belongs to user {STRANGER}"


def test_a_link_is_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert why_untrusted(tmp_path / "link") == ""
    folder.parent.chmod(0o777)
    assert why_untrusted(tmp_path / "link") == f"{folder.parent} can be written by every user"


def test_a_group_counts_as_others_unless_it_is_the_users_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o775)
    monkeypatch.setattr(trust, "_is_private", lambda gid: True)
    assert why_untrusted(folder) == ""
    monkeypatch.setattr(trust, "_is_private", lambda gid: False)
    assert why_untrusted(folder) == f"{folder} can be written by group {folder.stat().st_gid}"


@pytest.mark.parametrize(
    ("name", "members", "private"),
    [("me", [], True), ("me", ["me"], True), ("me", ["me", "you"], False), ("staff", [], False)],
)
def test_the_users_own_group(
    monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], private: bool
) -> None:
    import grp
    import pwd

    user = pwd.struct_passwd(("me", "x", 1000, 1000, "", "/home/me", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, members)))
    assert trust._is_private(1000) is private
    assert not trust._is_private(1001), "not the user's first group"


def test_a_file_that_others_can_write_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "file"
    file.write_bytes(b"content")
    assert read_trusted(file) == b"content"
    file.chmod(0o666)
    with pytest.raises(PermissionError, match="file can be written by every user"):
        read_trusted(file)
    file.chmod(0o644)
    give_away(file, monkeypatch)
    with pytest.raises(PermissionError, match=f"file belongs to user {STRANGER}"):
        read_trusted(file)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        why_untrusted(tmp_path / "gone")
