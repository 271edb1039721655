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
# kernels/hatch_build.py takes the C++ kernels from ~/.cache/fairlead, once they are compiled: not
# where CXX names the compiler, or FAIRLEAD_BUILD_KERNELS=1 asks for it.
say "Fairlead; its C++ kernels take a compiler up to two minutes, once; without one, PyTorch serves"
install --no-deps -e .
# What a server imports is compiled here, not at its first start, and not at each start where the
# environment forbids Python to keep byte code. Only that: it is a tenth of the files.
say "byte code of what a server imports"
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c '
from fairlead_runtime.processes.lean_imports import leave_compiler_out
leave_compiler_out()
import fairlead_runtime.build.build_engine, fairlead_runtime.llm
import fairlead_runtime.processes.http_process'
