#!/bin/sh
# Load PyTorch's CPU build, of the version that LOCK names, from the index TORCH_INDEX to FOLDER.
#   fetch_cpu_torch.sh LOCK FOLDER
# Prints its requirement with the hash TORCH_SHA256, which the installation then checks, or nothing
# where no index is set or it does not have that wheel.
set -eu
lock=$1 folder=$2
if [ -z "${TORCH_INDEX:-}" ]; then exit 0; fi
if [ -z "${TORCH_SHA256:-}" ]; then
    echo "TORCH_INDEX needs TORCH_SHA256, the hash of the wheel for this Python" >&2
    exit 1
fi
version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$lock")+cpu
# Nothing of a wheel runs when it is loaded, so its hash is checked when it is installed.
if sh "$(dirname "$0")/pip.sh" download --quiet --no-cache-dir --no-deps --only-binary :all: \
    --index-url "$TORCH_INDEX" --dest "$folder" "torch==$version" >&2; then
    echo "torch==$version --hash=sha256:$TORCH_SHA256"
else
    echo "TORCH_INDEX has no torch $version, or no answer: the CUDA build is trimmed" >&2
fi
