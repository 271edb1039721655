"""Write the image's list of what is in it: a CycloneDX 1.6 document of its packages.

    python sbom.py NAME DPKG_STATUS SITE_PACKAGES…

Python packages come from their metadata, Debian packages from dpkg's status file. The document
has no random number and the time of SOURCE_DATE_EPOCH, so the same image has the same document.
"""

import json
import os
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]


def python_component(package: Distribution) -> Component:
    name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
    purl = f"pkg:pypi/{name}@{quote(package.version)}"
    component: Component = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": package.version,
        "purl": purl,
    }
    if "License-Expression" in package.metadata:
        expression = package.metadata["License-Expression"]
        component["licenses"] = [{"expression": expression}]
    return component


def debian_component(fields: dict[str, str], release: str) -> Component:
    name, version = fields["Package"], fields["Version"]
    place = f"arch={fields['Architecture']}&distro={release}"
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?{place}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def debian_packages(status: str) -> list[dict[str, str]]:
    return [
        dict(line.split(": ", 1) for line in text.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        for text in status.strip().split("\n\n")
        if text.strip()
    ]


def document(name: str, status: Path, folders: list[str]) -> dict[str, Any]:
    release = "debian"
    if found := re.search(
        r'^VERSION_ID="?(\w+)', Path("/etc/os-release").read_text(), re.MULTILINE
    ):
        release = f"debian-{found[1]}"
    python = [python_component(package) for package in distributions(path=folders)]
    debian = [debian_component(fields, release) for fields in debian_packages(status.read_text())]
    own = next(part["version"] for part in python if part["name"] == "fairlead")
    made = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": made.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {"type": "container", "name": f"fairlead/{name}", "version": own},
        },
        "components": sorted(python + debian, key=lambda part: str(part["bom-ref"])),
    }


def main() -> int:
    name, status, *folders = sys.argv[1:]
    json.dump(document(name, Path(status), folders), sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
