#!/usr/bin/env bash
# Fill the virtual environment from the lock. Called by make; TORCH=cpu picks PyTorch's CPU build.
set -euo pipefail
venv=$1
uv="$venv/bin/uv"
export UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
if [ "${TORCH:-registry}" = cpu ]; then
    # The CPU wheels have other hashes than the lock records, so torch comes by version alone.
    version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.lock)
    rest=$(mktemp)
    trap 'rm -f "$rest"' EXIT
    # Drop torch and the CUDA parts only torch asks for: each entry runs to the next unindented line.
    awk '/^[a-z0-9]/ {keep = !($0 ~ /^(torch|triton|nvidia-[a-z0-9-]*|cuda-[a-z0-9-]*)==/)} keep' requirements.lock > "$rest"
    "$uv" pip install --quiet -p "$venv/bin/python" --torch-backend=cpu "torch==$version"
    "$uv" pip install --quiet -p "$venv/bin/python" --require-hashes --no-deps -r "$rest"
else
    "$uv" pip install --quiet -p "$venv/bin/python" --require-hashes -r requirements.lock
fi
"$uv" pip install --quiet -p "$venv/bin/python" --require-hashes --no-deps -r requirements-gpu.lock
"$uv" pip install --quiet -p "$venv/bin/python" --no-deps -e .
