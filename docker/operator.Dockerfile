# The operator's image: no torch, no compiler, no package manager. See docs/images.md.
# Any Debian image with python3 3.11 to 3.13 and its venv module serves as base.
ARG BASE=python:3.13-slim-bookworm

FROM ${BASE} AS root
COPY docker/strip_root.py docker/byte_code.py /build/
RUN PYTHONHASHSEED=0 python3 /build/strip_root.py

FROM ${BASE} AS packages
COPY docker/pip.sh docker/install.sh docker/select_lock.py docker/byte_code.py pyproject.toml \
    requirements.lock /build/
# The client has a class for each type of the API, in hundreds of files; the operator uses no class.
RUN --mount=type=secret,id=ca.pem --mount=type=secret,id=pip.conf \
    python3 /build/select_lock.py --extra operator /build | sh /build/install.sh /opt/fairlead \
    && PYTHONHASHSEED=0 python3 /build/byte_code.py /opt/fairlead \
        --skip '*/kubernetes/*client/models/*' --skip '*/kubernetes/*client/api/*'

FROM packages AS app
RUN --mount=type=secret,id=ca.pem --mount=type=secret,id=pip.conf \
    python3 /build/select_lock.py --only hatchling /build | sh /build/install.sh /tmp/hatch
COPY README.md LICENSE /build/
COPY operator /build/operator
COPY runtime /build/runtime
COPY kernels /build/kernels
COPY docker /build/docker
COPY --from=root /var/lib/dpkg/status /build/status
ARG SOURCE_DATE_EPOCH=315532800
RUN sh /build/docker/install_fairlead.sh operator /app

FROM scratch
COPY --from=root / /
COPY --from=packages /opt/fairlead /opt/fairlead
COPY --from=app /app /
ENV PATH=/opt/fairlead/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp USER=fairlead LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001
ENTRYPOINT ["fairlead"]
CMD ["operator", "--help"]
ARG VERSION=0
ARG REVISION=unknown
ARG CREATED=1980-01-01T00:00:00Z
LABEL org.opencontainers.image.title="Fairlead operator" \
      org.opencontainers.image.description="One InferenceDeployment becomes running pods, scaled on queue depth" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
