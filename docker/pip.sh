#!/bin/sh
# Run a pip of the build's own, with the bundle of trusted certificates and the settings that the
# builder may hand over (docs/images.md).
#   pip.sh ARGUMENT…
set -eu
pip=${TMPDIR:-/tmp}/pip
if [ -s /run/secrets/ca.pem ]; then export PIP_CERT=/run/secrets/ca.pem; fi
if [ -s /run/secrets/pip.conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip.conf; fi
if [ ! -x "$pip/bin/pip" ]; then python3 -m venv "$pip"; fi
exec "$pip/bin/pip" --disable-pip-version-check "$@"
