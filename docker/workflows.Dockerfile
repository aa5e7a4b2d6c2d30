# The image for workflow managers: without an entry point, and with the `ps` that Nextflow needs to measure memory.
#   docker build -f docker/workflows.Dockerfile -t stackseg:0.1.0-workflows docker
ARG IMAGE=stackseg:0.1.0-cpu
# hadolint ignore=DL3006
FROM ${IMAGE}
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends procps \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENTRYPOINT []
HEALTHCHECK NONE
CMD ["bash"]
