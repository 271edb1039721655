"""Strip a Debian root file system to what the images need: Python, a shell, coreutils, grep.

Package managers, Perl, accounts, documents and caches go. The names of the packages that stay
remain in dpkg's status file, where scanners and `sbom.py` read them. Afterwards every ELF file
must still find its libraries, else the build ends here.

Runs as root inside a build stage, on that stage's own root.
"""

import fnmatch
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from byte_code import compile_folder

USER = 10001
GONE = (
    # Package managers, and what only they need.
    *("apt", "dpkg", "debconf", "libapt-pkg*", "libdebconfclient0", "debian-archive-keyring"),
    *("gpgv", "gnupg*", "usrmerge", "usr-is-merged", "ucf", "python3-pip*", "python3-setuptools*"),
    *("python3*-venv", "python3-wheel*", "python3-distutils", "python3-lib2to3"),
    *("libgnutls30*", "libhogweed6*", "libnettle8*", "libp11-kit0", "libtasn1-6", "libidn2-0"),
    *("libunistring*", "libgcrypt20", "libgpg-error0", "libxxhash0", "libseccomp2", "libgmp10"),
    # Perl and its modules.
    *("perl", "perl-base", "perl-modules-*", "libperl*", "lib*-perl"),
    # Accounts, mounts, file systems, services: nothing in a container's root changes these.
    *("adduser", "passwd", "login", "login.defs", "libpam*", "libsemanage*", "libsepol*"),
    *("e2fsprogs", "libext2fs2*", "libss2", "logsave", "mount", "util-linux*", "bsdutils"),
    *("libmount1", "libsmartcols1", "libblkid1", "init-system-helpers", "sysvinit-utils"),
    *("libsystemd0", "libudev1", "libfdisk1", "libproc2-0", "procps", "openssl"),
    # Compilers, where the base has them.
    *("gcc", "gcc-[0-9]*[0-9]", "g++*", "cpp*", "make", "binutils*", "libc6-dev", "*-dev"),
)
# Each path is relative to the root.
WASTE = (
    *("usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian"),
    *(
        "usr/share/perl*",
        "usr/share/python-wheels",
        "usr/share/debconf",
        "usr/share/bash-completion",
    ),
    *("usr/lib/python3*/ensurepip", "usr/local/lib/python3*/ensurepip"),
    *("usr/lib/python3*/test", "usr/local/lib/python3*/test", "usr/local/lib/python3*/idlelib"),
    *("usr/local/lib/python3*/site-packages/*", "usr/local/bin/pip*", "usr/local/bin/idle*"),
    *(
        "usr/local/bin/python3*-config",
        "usr/local/include",
        "usr/include",
        "usr/local/lib/pkgconfig",
    ),
    *("etc/apt", "etc/dpkg", "etc/pam.d", "etc/security", "etc/perl", "etc/cron.*", "etc/systemd"),
    *("etc/rc?.d", "etc/init.d", "etc/default", "etc/skel", "etc/update-motd.d", "etc/logrotate.d"),
    *("etc/alternatives/*.gz", "etc/fstab", "etc/motd", "etc/issue*", "etc/subuid", "etc/subgid"),
    *("usr/share/applications", "usr/share/menu", "usr/share/pixmaps", "usr/share/doc-base"),
    *("usr/libexec/dpkg", "usr/share/bug", "usr/share/gdb", "usr/lib/valgrind"),
    *(
        "etc/*-",
        "etc/.pwd.lock",
        "etc/machine-id",
        "etc/shadow",
        "etc/gshadow",
        "var/lib/apt",
        "var/lib/pam",
    ),
    *("usr/lib/*/gconv", "usr/lib/systemd", "usr/lib/apt", "usr/lib/dpkg", "usr/lib/udev"),
    *("var/lib/systemd", "var/lib/shells.state", "var/lib/dpkg/*-old", "var/lib/dpkg/lock*"),
    *("var/cache/*", "var/log/*", "var/backups/*", "root/.*", "build"),
)


def removed(package: str) -> bool:
    return any(fnmatch.fnmatch(package, pattern) for pattern in GONE)


def stanzas(status: str) -> dict[str, str]:
    """dpkg's paragraph of each installed package."""
    found = {}
    for text in filter(None, status.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        found[fields["Package"]] = text.strip()
    return found


def files_of(info: Path, package: str) -> set[str]:
    lists = [*info.glob(f"{package}.list"), *info.glob(f"{package}:*.list")]
    return {line for path in lists for line in path.read_text().splitlines()}


def real(root: Path, name: str) -> str:
    """Where a packaged path really is: /bin and /lib are links into /usr on a merged root."""
    path = root / name.lstrip("/")
    return str(path.parent.resolve() / path.name)


def remove_packages(root: Path) -> None:
    dpkg = root / "var/lib/dpkg"
    packages = stanzas((dpkg / "status").read_text())
    kept = {
        real(root, name)
        for package in packages
        if not removed(package)
        for name in files_of(dpkg / "info", package)
    }
    for package in filter(removed, packages):
        for name in files_of(dpkg / "info", package):
            path = Path(real(root, name))
            if str(path) not in kept and (path.is_symlink() or path.is_file()):
                path.unlink()
    rest = [text for package, text in packages.items() if not removed(package)]
    shutil.rmtree(dpkg)
    dpkg.mkdir()
    (dpkg / "status").write_text("\n\n".join(rest) + "\n")


def remove_waste(root: Path) -> None:
    for pattern in WASTE:
        for path in root.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for path in (root / "usr/share/doc").rglob("*"):
        if path.name != "copyright" and (path.is_symlink() or path.is_file()):
            path.unlink()
    for folder in ("usr/share", "usr/lib", "etc", "var"):
        paths = sorted((root / folder).rglob("*"), reverse=True)
        for path in paths:
            if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
                path.rmdir()
    for folder in ("usr/bin", "usr/sbin", "usr/local/bin", "usr/lib"):
        for path in (root / folder).rglob("*"):
            if path.is_symlink() and not path.exists():
                path.unlink()
            elif path.is_file() and not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o1777)  # no setuid or setgid program
    for folder in ("var/tmp", "var/log", "var/cache"):
        (root / folder).mkdir(exist_ok=True, parents=True)
    (root / "var/tmp").chmod(0o1777)


def add_user(root: Path) -> None:
    with (root / "etc/passwd").open("a") as file:
        file.write(f"fairlead:x:{USER}:{USER}::/tmp:/usr/sbin/nologin\n")
    with (root / "etc/group").open("a") as file:
        file.write(f"fairlead:x:{USER}:\n")


def compile_library(root: Path) -> None:
    for cache in [*root.glob("usr/**/__pycache__")]:
        shutil.rmtree(cache)
    compile_folder(Path(sysconfig.get_path("stdlib")))


def lacking(root: Path) -> list[str]:
    """ELF files that do not find a library."""
    wrong = []
    for path in sorted(root.glob("usr/**/*")):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
        loader = next(root.glob("lib64/ld-linux*"), None) or next(root.glob("lib/ld-linux*"))
        answer = subprocess.run(
            [str(loader), "--list", str(path)], capture_output=True, text=True, check=False
        )
        wrong += [
            f"{path}: {line.strip()}" for line in answer.stdout.splitlines() if "not found" in line
        ]
    return wrong


def main() -> int:
    root = Path("/")
    remove_packages(root)
    remove_waste(root)
    add_user(root)
    compile_library(root)
    wrong = lacking(root)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
