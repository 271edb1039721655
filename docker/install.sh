#!/bin/sh
# Install the requirements read from standard input into a virtual environment without pip.
# Only wheels, and only those whose hash is in the list.
#   install.sh VENV [OPTION OF pip install]… < REQUIREMENTS
set -eu
venv=$1
shift
requirements=$(mktemp)
cat > "$requirements"
if [ ! -s "$requirements" ]; then
    echo "install.sh: no requirements to install" >&2
    exit 1
fi
if [ ! -x "$venv/bin/python" ]; then python3 -m venv --without-pip "$venv"; fi
sh "$(dirname "$0")/pip.sh" --python "$venv/bin/python" install --quiet --no-cache-dir \
    --no-compile --no-deps --only-binary :all: --require-hashes "$@" -r "$requirements"
rm -f "$requirements" "$venv"/bin/activate* "$venv"/bin/Activate*
