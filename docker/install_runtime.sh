#!/bin/sh
# Install what the runtime needs on DEVICE (cpu or cuda) into the virtual environment VENV.
#   install_runtime.sh VENV DEVICE
set -eu
venv=$1 device=$2
# torch names triton and setuptools for compiling models, which the runtime does not do.
select="python3 /build/select_lock.py --without triton --without setuptools"
case $device in
cuda)
    $select --extra runtime --extra tracing /build | sh /build/install.sh "$venv"
    ;;
cpu)
    # Of the GPU libraries only CUDA's own runtime stays (trim_torch.py).
    {
        $select --extra runtime --extra tracing --without 'nvidia-*' --without 'cuda-*' /build
        $select --only nvidia-cuda-runtime /build
    } | sh /build/install.sh "$venv"
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    apt-get update --quiet=2
    apt-get install --quiet=2 --yes --no-install-recommends gcc libc6-dev binutils > /dev/null
    python3 /build/trim_torch.py "$packages" "$venv/bin/python"
    ;;
*)
    echo "DEVICE is cpu or cuda, not $device" >&2
    exit 1
    ;;
esac
PYTHONHASHSEED=0 python3 /build/byte_code.py "$venv"
