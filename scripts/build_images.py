"""`make images`: build the container images and write each to a tar file that any engine imports.

    build_images.py [--builder docker|podman|buildah] [--out DIR] [--base IMAGE]
                    [--torch-index URL --torch-sha256 HASH] [NAME…]

Without `--base` the base image is made from Debian's packages with mmdebstrap, once, and kept by
the builder under the name of BASE. No registry is asked for anything then.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Each image's Dockerfile, what follows the version in its tag, and its own build arguments.
IMAGES: dict[str, tuple[str, str, dict[str, str]]] = {
    "operator": ("operator", "", {}),
    "runtime": ("runtime", "", {"DEVICE": "cpu"}),
    "runtime-cuda": ("runtime", "-cuda", {"DEVICE": "cuda"}),
}
DEFAULT = ("operator", "runtime")
SUITE = "bookworm"
BASE = f"localhost/fairlead-base:{SUITE}"
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
# Of every file in a layer, so that a layer changes only with its files. 1980: the first year that
# zip files, and so wheels, can hold.
EPOCH = "315532800"
BUILDERS = ("docker", "podman", "buildah")


def run(*command: str, cwd: Path = ROOT) -> None:
    print("+", " ".join(command), flush=True)
    environment = {
        # A build needs no namespace of its own: chroot works where a machine allows none.
        "BUILDAH_ISOLATION": "chroot",
        "DOCKER_BUILDKIT": "1",
        "SOURCE_DATE_EPOCH": EPOCH,
        **os.environ,
    }
    if subprocess.run(command, cwd=cwd, env=environment, check=False).returncode:
        raise SystemExit(f"failed: {command[0]} {command[1]}")


def answers(*command: str) -> bool:
    return (
        shutil.which(command[0]) is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def pick_builder() -> str:
    """The first that works: docker's client alone builds nothing."""
    for builder in BUILDERS:
        if answers(builder, "info"):
            return builder
    raise SystemExit(
        "make images needs docker with its daemon, podman or buildah (on Debian: apt-get install "
        "buildah mmdebstrap); what else it needs: docs/images.md"
    )


def git(*arguments: str) -> str:
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def secrets() -> list[str]:
    """What a build needs to reach the package index where that is not reached directly."""
    files = {
        "ca.pem": os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE"),
        "pip.conf": os.environ.get("PIP_CONFIG_FILE"),
    }
    return [f"--secret=id={name},src={path}" for name, path in files.items() if path]


def reproducible(builder: str) -> list[str]:
    if builder == "docker":
        return [f"--build-arg=SOURCE_DATE_EPOCH={EPOCH}"]
    return [f"--timestamp={EPOCH}", "--layers", "--format=docker"]


def make_base(builder: str) -> str:
    if answers(builder, *(("image",) if builder != "buildah" else ()), "inspect", BASE):
        return BASE
    if not shutil.which("mmdebstrap"):
        raise SystemExit("install mmdebstrap, which makes the base image, or name one with BASE=")
    with tempfile.TemporaryDirectory() as folder:
        tar = Path(folder) / "base.tar"
        packages = ",".join(BASE_PACKAGES)
        # mmdebstrap copies these from the machine that it runs on.
        forget = 'for name in hostname resolv.conf; do : > "$1/etc/$name"; done'
        options = (f"--include={packages}", f"--customize-hook={forget}")
        run("mmdebstrap", "--variant=minbase", *options, SUITE, str(tar))
        (Path(folder) / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        run(builder, "build", *reproducible(builder), f"--tag={BASE}", folder)
    return BASE


def build(builder: str, name: str, version: str, options: list[str], out: Path) -> None:
    dockerfile, suffix, arguments = IMAGES[name]
    tag = f"docker.io/fairlead/{dockerfile}:{version}{suffix}"
    tar = out / f"{name}.tar"
    tar.unlink(missing_ok=True)
    what = [f"--file=docker/{dockerfile}.Dockerfile", f"--tag={tag}", *options]
    what += [f"--build-arg={key}={value}" for key, value in arguments.items()]
    if builder == "docker":
        # Only the exporter sets the times of the files in the layers. It loads the image: docker's
        # own builder, which most have, writes no tar file.
        run("docker", "buildx", "build", *what, "--output=type=docker,rewrite-timestamp=true", ".")
        run("docker", "save", f"--output={tar}", tag)
    elif builder == "podman":
        run("podman", "build", *what, ".")
        run("podman", "save", "--quiet", "--format=docker-archive", f"--output={tar}", tag)
    else:
        run("buildah", "build", *what, ".")
        run("buildah", "push", "--quiet", tag, f"docker-archive:{tar}:{tag}")
    print(f"{tag}: {tar} ({tar.stat().st_size / 1e6:.0f} MB)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--builder", choices=BUILDERS, help="default: the first that works")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--base", help="a Debian image with python3 and its venv module")
    # make puts the variables of its command line into the environment.
    index, sha256 = (os.environ.get(name, "") for name in ("TORCH_INDEX", "TORCH_SHA256"))
    parser.add_argument("--torch-index", default=index, help="PyTorch's CPU index")
    parser.add_argument("--torch-sha256", default=sha256, help="of its wheel for the base's Python")
    parser.add_argument("--no-cache", action="store_true", help="build every stage again")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(IMAGES)}")
    options = parser.parse_args()
    if unknown := set(options.names) - IMAGES.keys():
        parser.error(f"{', '.join(unknown)}: an image is one of {', '.join(IMAGES)}")
    if options.torch_index and not re.fullmatch(r"[0-9a-f]{64}", options.torch_sha256):
        parser.error("TORCH_INDEX needs TORCH_SHA256: 64 digits, listed on the index's page")
    builder = options.builder or pick_builder()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    made = datetime.fromtimestamp(int(git("log", "-1", "--format=%ct")), UTC)
    arguments = {
        "BASE": options.base or make_base(builder),
        "VERSION": version,
        "REVISION": git("rev-parse", "HEAD"),
        "CREATED": made.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if jobs := os.environ.get("MAX_JOBS"):
        arguments["MAX_JOBS"] = jobs
    if options.torch_index:
        arguments |= {"TORCH_INDEX": options.torch_index, "TORCH_SHA256": options.torch_sha256}
    common = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    common += [*reproducible(builder), *secrets()]
    if options.no_cache:
        common.append("--no-cache")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or DEFAULT:
        build(builder, name, version, common, options.out.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
