"""What is taken out of the base image (docker/strip_root.py), on a small root in a folder."""

from pathlib import Path

import pytest

from strip_root import add_user, remove_packages, remove_waste

STATUS = """\
Package: apt
Status: install ok installed
Version: 2.6
Architecture: amd64

Package: coreutils
Status: install ok installed
Version: 9.1
Architecture: amd64
Description: tools
 that every script needs

Package: libperl5.36
Status: install ok installed
Version: 5.36
Architecture: amd64
"""
FILES = {
    "apt": ["/usr/bin/apt", "/usr/share/doc/shared"],
    "coreutils": ["/usr/bin/ls", "/usr/share/doc/shared"],
    "libperl5.36:amd64": ["/lib/libperl.so.5"],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("usr/bin", "usr/sbin", "usr/lib", "usr/local/bin", "usr/share/doc/x", "etc"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    info = tmp_path / "var/lib/dpkg/info"
    info.mkdir(parents=True)
    (info.parent / "status").write_text(STATUS)
    for package, names in FILES.items():
        (info / f"{package}.list").write_text("\n".join(["/.", "/usr", *names]) + "\n")
        for name in names:
            (tmp_path / name.lstrip("/")).write_text("content")
    return tmp_path


def test_a_package_goes_with_its_files_but_not_with_those_of_others(root: Path) -> None:
    remove_packages(root)
    assert not (root / "usr/bin/apt").exists()
    assert not (root / "usr/lib/libperl.so.5").exists()
    assert (root / "usr/bin/ls").exists()
    assert (root / "usr/share/doc/shared").exists()


def test_the_status_names_what_stays_for_scanners(root: Path) -> None:
    remove_packages(root)
    status = (root / "var/lib/dpkg/status").read_text()
    assert "Package: coreutils" in status
    assert "that every script needs" in status
    assert "apt" not in status
    assert not (root / "var/lib/dpkg/info").exists()


def test_programs_lose_setuid_and_licences_stay(root: Path) -> None:
    (root / "usr/bin/ls").chmod(0o4755)
    for name in ("copyright", "changelog.gz"):
        (root / "usr/share/doc/x" / name).write_text("text")
    remove_waste(root)
    assert (root / "usr/bin/ls").stat().st_mode & 0o7777 == 0o755
    assert [path.name for path in (root / "usr/share/doc/x").iterdir()] == ["copyright"]


def test_the_user_gets_a_name_and_a_group(root: Path) -> None:
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    add_user(root)
    assert (root / "etc/passwd").read_text().splitlines()[1].startswith("fairlead:x:10001:10001:")
    assert (root / "etc/group").read_text().splitlines()[1] == "fairlead:x:10001:"
