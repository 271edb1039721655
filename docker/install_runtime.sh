#!/bin/sh
# Install what the runtime needs on DEVICE (cpu or cuda) into the virtual environment VENV.
#   install_runtime.sh VENV DEVICE
# For the CPU, TORCH_INDEX may be the address of PyTorch's CPU index and TORCH_SHA256 the hash of
# its wheel (docs/images.md). Where the index has no answer the CUDA build is trimmed.
set -euf
venv=$1 device=$2
build=$(dirname "$0")
wheels=${TMPDIR:-/tmp}/torch
# torch names setuptools for compiling models, which the runtime does not do.
select="python3 $build/select_lock.py --without setuptools"
case $device in
cuda)
    # A stage of its own compiles flashinfer's kernels (compile_flashinfer.sh).
    select="$select --without ninja --without nvidia-cuda-nvcc --without nvidia-cuda-crt"
    select="$select --without nvidia-nvvm"
    # For CUDA 12, and for experts on several nodes.
    select="$select --without nvidia-cutlass-dsl-libs-cu12 --without nccl-extensions"
    select="$select --without nccl4py --lock requirements-cuda.lock"
    $select --extra runtime --extra tracing --extra cuda "$build" | sh "$build/install.sh" "$venv"
    sh "$build/trim_triton.sh" "$venv"
    ;;
cpu)
    cpu_torch=$(sh "$build/fetch_cpu_torch.sh" "$build/requirements.lock" "$wheels")
    select="$select --extra runtime --extra tracing --without nvidia-* --without cuda-*"
    select="$select --without triton"
    if [ -n "$cpu_torch" ]; then
        $select --instead "$cpu_torch" "$build" \
            | sh "$build/install.sh" "$venv" --find-links "$wheels"
        rm -r "$wheels"
    else
        # Of the GPU libraries only CUDA's own runtime stays (trim_torch.py).
        {
            $select "$build"
            python3 "$build/select_lock.py" --only nvidia-cuda-runtime "$build"
        } | sh "$build/install.sh" "$venv"
        apt-get update --quiet=2
        apt-get install --quiet=2 --yes --no-install-recommends gcc libc6-dev binutils > /dev/null
    fi
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    python3 "$build/trim_torch.py" "$packages" "$venv/bin/python"
    ;;
*)
    echo "DEVICE is cpu or cuda, not $device" >&2
    exit 1
    ;;
esac
"$venv/bin/python" -B "$build/keep_names.py"
PYTHONHASHSEED=0 python3 "$build/byte_code.py" "$venv"
