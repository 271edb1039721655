"""A compiler that compiles nothing: it links what `make setup` has compiled of the same sources and
flags, and notes what it was asked for.
"""

from pathlib import Path

from fairlead_kernels.cpu import library

NATIVE = library.FOLDER
_SCRIPT = """#!/bin/sh
for word; do
    case $word in
    -march=x86-64) name=baseline ;;
    -march=x86-64-v3) name=avx2 ;;
    -march=x86-64-v4) name=avx512 ;;
    -c) compiles=1 ;;
    -DFAIRLEAD_SOURCES=*) hash=${word#*=} ;;
    -Wl*) ;;
    *) out=$word ;;
    esac
done
echo "${compiles:-0} $name ${out##*/}" >> LOG
if [ "$compiles" ]; then
    echo "$hash" | tr -d '"' > "$out"
    exit
fi
for object in "$(dirname "$out")"/*.o; do
    grep -q -F -f "$object" NATIVE/$name.so && continue
    echo "error: the libraries are not of these sources: run \\`make setup\\`" >&2
    exit 1
done
cp NATIVE/$name.so "$out"
"""


class CopyingCompiler:
    """``path``: to name in CXX."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "copying-c++"
        self._log = folder / "copying-c++.log"
        script = _SCRIPT.replace("LOG", str(self._log)).replace("NATIVE", str(NATIVE))
        self.path.write_text(script)
        self.path.chmod(0o755)

    def links(self) -> list[str]:
        """The libraries that it has linked, in their order."""
        if not self._log.exists():
            return []
        lines = (line.split() for line in self._log.read_text().splitlines())
        return [out for compiles, _, out in lines if compiles == "0"]

    def files(self) -> list[str]:
        """The objects that it has compiled."""
        lines = (line.split() for line in self._log.read_text().splitlines())
        return [out for compiles, _, out in lines if compiles == "1"]
