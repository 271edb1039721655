#!/bin/sh
# Prepare the Triton in the virtual environment VENV for pods without a C compiler (trim_triton.py).
#   trim_triton.sh VENV
# Installs a compiler: run it in a stage of which only VENV is kept.
set -eu
venv=$1
ask() { "$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('$1'))"; }
# Debian has Python's headers in a package of their own, Python's images have them.
if [ -e "$(ask include)/Python.h" ]; then headers=""; else headers=libpython3-dev; fi
apt-get update --quiet=2
apt-get install --quiet=2 --yes --no-install-recommends gcc libc6-dev binutils $headers > /dev/null
python3 "$(dirname "$0")/trim_triton.py" "$(ask purelib)" "$venv/bin/python"
