# The runtime's image, for CPUs (DEVICE=cpu) or NVIDIA GPUs (DEVICE=cuda). See docs/images.md.
# Any Debian image with python3 3.11 to 3.13 and its venv module serves as base.
ARG BASE=python:3.13-slim-bookworm

FROM ${BASE} AS root
COPY docker/strip_root.py docker/byte_code.py /build/
RUN PYTHONHASHSEED=0 python3 /build/strip_root.py

FROM ${BASE} AS packages
COPY docker/pip.sh docker/install.sh docker/install_runtime.sh docker/fetch_cpu_torch.sh \
    docker/select_lock.py docker/trim_torch.py docker/trim_triton.sh docker/trim_triton.py \
    docker/keep_names.py docker/byte_code.py pyproject.toml requirements.lock \
    docker/requirements-cuda.lock /build/
ARG DEVICE=cpu
ARG TORCH_INDEX=""
ARG TORCH_SHA256=""
RUN --mount=type=secret,id=ca.pem --mount=type=secret,id=pip.conf \
    sh /build/install_runtime.sh /opt/fairlead "${DEVICE}"

# Only /kernels of this stage is in the image; for CPUs that is empty.
FROM packages AS kernels
COPY docker/compile_flashinfer.sh docker/compile_flashinfer.py docker/flashinfer_modules.toml \
    /build/
ARG DEVICE=cpu
ARG MAX_JOBS=""
RUN --mount=type=secret,id=ca.pem --mount=type=secret,id=pip.conf \
    sh /build/compile_flashinfer.sh /opt/fairlead "${DEVICE}" /kernels

FROM packages AS app
RUN --mount=type=secret,id=ca.pem --mount=type=secret,id=pip.conf \
    python3 /build/select_lock.py --only hatchling /build | sh /build/install.sh /tmp/hatch
# For the kernels; like all of this stage but /app it is in no image.
RUN apt-get update --quiet=2 \
    && apt-get install --quiet=2 --yes --no-install-recommends g++ > /dev/null
# Two minutes of a processor, again only where the sources or their build change.
COPY kernels/fairlead_kernels/__init__.py /build/kernels/fairlead_kernels/
COPY kernels/fairlead_kernels/cpu/__init__.py kernels/fairlead_kernels/cpu/sources.py \
    kernels/fairlead_kernels/cpu/compilation.py /build/kernels/fairlead_kernels/cpu/
COPY kernels/fairlead_kernels/csrc /build/kernels/fairlead_kernels/csrc
RUN if [ "$(uname -m)" = x86_64 ]; then \
        PYTHONPATH=/build/kernels python3 -B -m fairlead_kernels.cpu.compilation /build/native; \
    fi
COPY README.md LICENSE /build/
COPY operator /build/operator
COPY runtime /build/runtime
COPY kernels /build/kernels
COPY docker /build/docker
COPY --from=root /var/lib/dpkg/status /build/status
ARG SOURCE_DATE_EPOCH=315532800
RUN sh /build/docker/install_fairlead.sh runtime /app

FROM scratch
COPY --from=root / /
COPY --from=packages /opt/fairlead /opt/fairlead
COPY --from=kernels /kernels /
COPY --from=app /app /
# What it has of the C++ kernels was compiled above: no pod compiles any.
ENV FAIRLEAD_BUILD_KERNELS=0
# Of flashinfer's modules only those of the stage `kernels` count: no pod compiles one.
ENV FLASHINFER_DISABLE_JIT=1
# Where some clusters, Google's among them, put the driver without telling the loader.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64
ENV PATH=/opt/fairlead/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp USER=fairlead LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001
EXPOSE 8000 9000
ENTRYPOINT ["fairlead"]
CMD ["serve", "--help"]
ARG VERSION=0
ARG REVISION=unknown
ARG CREATED=1980-01-01T00:00:00Z
LABEL org.opencontainers.image.title="Fairlead runtime" \
      org.opencontainers.image.description="Serves a language model with continuous batching over a paged cache" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
