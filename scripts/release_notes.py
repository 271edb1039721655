"""Print the changelog's section of a version, for the notes of its release.

    release_notes.py VERSION

Ends with 1 when the project, the chart and the changelog do not agree on the version.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def section(changelog: str, version: str) -> str:
    """What stands under the version's heading, up to the next one. Raises LookupError."""
    heading = rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)"
    found = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        raise LookupError(f"CHANGELOG.md has no section for {version}: rename [Unreleased] first")
    return found[1].strip()


def disagreeing(root: Path, version: str) -> list[str]:
    """Where another version is written."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    chart = (root / "charts/fairlead/Chart.yaml").read_text()
    written = {
        "pyproject.toml": project,
        "Chart.yaml, version": re.findall(r"^version: (\S+)$", chart, re.MULTILINE)[0],
        "Chart.yaml, appVersion": re.findall(r'^appVersion: "(\S+)"$', chart, re.MULTILINE)[0],
    }
    return [f"{place} says {found}" for place, found in written.items() if found != version]


def main() -> int:
    version = sys.argv[1]
    try:
        notes = section((ROOT / "CHANGELOG.md").read_text(), version)
    except LookupError as error:
        print(error, file=sys.stderr)
        return 1
    if wrong := disagreeing(ROOT, version):
        print(f"the release is {version}, but {'; '.join(wrong)}", file=sys.stderr)
        return 1
    print(notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
