#!/bin/sh
# Install the requirements read from standard input into a virtual environment without pip.
# Only wheels, and only those whose hash is in the list.
#   install.sh VENV < REQUIREMENTS
set -eu
venv=$1
requirements=$(mktemp)
cat > "$requirements"
# The builder may hand over a bundle of trusted certificates and pip's settings (docs/images.md).
if [ -s /run/secrets/ca.pem ]; then export PIP_CERT=/run/secrets/ca.pem; fi
if [ -s /run/secrets/pip.conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip.conf; fi
if [ ! -x /tmp/pip/bin/pip ]; then python3 -m venv /tmp/pip; fi
if [ ! -x "$venv/bin/python" ]; then python3 -m venv --without-pip "$venv"; fi
/tmp/pip/bin/pip --python "$venv/bin/python" --disable-pip-version-check install --quiet \
    --no-compile --no-deps --only-binary :all: --require-hashes -r "$requirements"
rm -f "$requirements" "$venv"/bin/activate* "$venv"/bin/Activate*
