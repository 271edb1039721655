#!/bin/sh
# For DEVICE cuda, compile flashinfer's modules of the list below the folder OUT, at the path where
# the flashinfer in the virtual environment VENV looks for them. For cpu OUT stays empty.
#   compile_flashinfer.sh VENV DEVICE OUT
# Installs compilers: run it in a stage of which only OUT is kept.
set -eu
venv=$1 device=$2 out=$3
build=$(dirname "$0")
mkdir -p "$out"
if [ "$device" != cuda ]; then exit 0; fi
apt-get update --quiet=2
apt-get install --quiet=2 --yes --no-install-recommends g++ > /dev/null
python3 "$build/select_lock.py" --lock requirements-cuda.lock --only nvidia-cuda-nvcc \
    --only nvidia-cuda-cccl --only ninja "$build" | sh "$build/install.sh" /tmp/nvcc
CUDA_HOME=$(echo /tmp/nvcc/lib/python3*/site-packages/nvidia/cu[0-9]*)
# The wheels lack the names that a linker looks for. The driver's library is the node's: an empty
# one of its name is enough to link and, without a GPU, to load the modules for the check.
ln -s lib "$CUDA_HOME/lib64"
(cd "$CUDA_HOME/lib" && ln -s libcudart.so.* libcudart.so)
mkdir "$CUDA_HOME/lib/stubs"
echo | g++ -shared -x c++ - -Wl,-soname,libcuda.so.1 -o "$CUDA_HOME/lib/stubs/libcuda.so.1"
ln -s libcuda.so.1 "$CUDA_HOME/lib/stubs/libcuda.so"
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export CUDA_HOME PATH="/tmp/nvcc/bin:$PATH" LD_LIBRARY_PATH="$CUDA_HOME/lib/stubs"
export FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer
"$venv/bin/python" "$build/compile_flashinfer.py" "$build/flashinfer_modules.toml" \
    "$out$packages/flashinfer/data/aot"
