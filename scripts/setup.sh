#!/usr/bin/env bash
# Fill the virtual environment from the lock. Called by make; TORCH=cpu picks PyTorch's CPU build.
set -euo pipefail
venv=$1
uv="$venv/bin/uv"

say() { echo "setup: $*"; }

# A person sees uv's bars; what is not read by a person needs none.
install() {
    local command=("$uv" pip install -p "$venv/bin/python" "$@")
    if [ -t 1 ] && [ -t 2 ]; then
        "$venv/bin/python" scripts/without_list.py "${command[@]}"
    else
        "${command[@]}" --quiet
    fi
}
export UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
if [ "${TORCH:-registry}" = cpu ]; then
    # The CPU wheels have other hashes than the lock records, so torch comes by version alone.
    version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.lock)
    rest=$(mktemp)
    trap 'rm -f "$rest"' EXIT
    # Drop torch and the CUDA parts only torch asks for: each entry runs to the next unindented line.
    awk '/^[a-z0-9]/ {keep = !($0 ~ /^(torch|triton|nvidia-[a-z0-9-]*|cuda-[a-z0-9-]*)==/)} keep' requirements.lock > "$rest"
    say "packages, with PyTorch for CPUs: minutes the first time, seconds from uv's cache"
    install --torch-backend=cpu "torch==$version"
    install --require-hashes --no-deps -r "$rest"
else
    say "packages, with PyTorch for GPUs and CPUs: some 3 GB the first time, seconds from uv's cache"
    say "on a machine without a GPU, 'make demo TORCH=cpu' loads less and needs 5 GB less"
    install --require-hashes -r requirements.lock
fi
install --require-hashes --no-deps -r requirements-gpu.lock
# As in the images: hundreds of processes of the tests import transformers.
"$venv/bin/python" -B docker/keep_names.py
# The kernels take two minutes of a processor to compile: once for each state of their sources, the
# flags and the compiler, not once for each clone.
native=kernels/fairlead_kernels/native
made="${XDG_CACHE_HOME:-$HOME/.cache}/fairlead/kernels-$(
    { cat kernels/hatch_build.py kernels/fairlead_kernels/cpu/sources.py kernels/fairlead_kernels/csrc/*
      "${CXX:-c++}" --version || true; uname -m; } 2>/dev/null | sha256sum | cut -c1-16)"
if [ -z "${FAIRLEAD_BUILD_KERNELS:-}" ] && [ -d "$made" ]; then
    say "Fairlead, with the C++ kernels that were compiled before"
    mkdir -p "$native"
    cp "$made"/*.so "$native"
    FAIRLEAD_BUILD_KERNELS=0 install --no-deps -e .
else
    say "Fairlead, whose C++ kernels a compiler takes up to two minutes for; without one, PyTorch serves"
    install --no-deps -e .
    if [ -e "$native/baseline.so" ]; then
        part=$(mktemp -d -p "$(mkdir -p "${made%/*}" && echo "${made%/*}")")
        cp "$native"/*.so "$part"
        mv -T "$part" "$made" 2>/dev/null || rm -r "$part"  # another setup was first
    fi
fi
# What a server imports is compiled here, not at its first start, and not at each start where the
# environment forbids Python to keep byte code. Only that: it is a tenth of the files.
say "byte code of what a server imports"
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c '
from fairlead_runtime.processes.lean_imports import leave_compiler_out
leave_compiler_out()
import fairlead_runtime.build.build_engine, fairlead_runtime.llm
import fairlead_runtime.processes.http_process'
