#!/bin/sh
# Build Fairlead's wheel and unpack it, with the SBOM of the image NAME, below the folder APP.
#   install_fairlead.sh NAME APP
set -eu
name=$1 app=$2
venv=/opt/fairlead
cd /build
# The runtime's image must have the C++ kernels where they exist, compiled by an earlier layer; the
# operator computes nothing.
case $name-$(uname -m) in
runtime-x86_64) export FAIRLEAD_BUILD_KERNELS=1 FAIRLEAD_KERNELS=/build/native ;;
*) export FAIRLEAD_BUILD_KERNELS=0 ;;
esac
sh docker/pip.sh --python /tmp/hatch/bin/python wheel --quiet --no-deps --no-build-isolation \
    --no-index --wheel-dir /tmp/wheel .
sh docker/pip.sh --python "$venv/bin/python" install --quiet --no-deps --no-compile --no-index \
    --root "$app" /tmp/wheel/*.whl
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
PYTHONHASHSEED=0 python3 docker/byte_code.py "$app" --root "$app"
python3 docker/sbom.py "$name" /build/status "$packages" "$app$packages" > "$app$venv/sbom.cdx.json"
