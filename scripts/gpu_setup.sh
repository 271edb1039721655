#!/usr/bin/env bash
# Add to the virtual environment what only GPUs run: the CUDA image's packages, with nvcc. Called by
# make; docker/compile_flashinfer.sh does the same to a folder of its own.
set -euo pipefail
venv=$1
"$venv/bin/uv" pip install --quiet -p "$venv/bin/python" --require-hashes -r docker/requirements-cuda.lock
# The wheels lack the names that a linker looks for. A driver's library may lack its own, too: to
# link, an empty one of its name is enough.
cd "$venv"/lib/python3*/site-packages/nvidia/cu[0-9]*
ln -sfn lib lib64
(cd lib && ln -sf libcudart.so.* libcudart.so)
mkdir -p lib/stubs
echo | g++ -shared -x c++ - -Wl,-soname,libcuda.so.1 -o lib/stubs/libcuda.so
