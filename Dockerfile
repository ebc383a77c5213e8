# docker build -t megatron-dapo .                                          CUDA 13, as measured on one H200
# docker build -t megatron-dapo:cpu --build-arg BASE_IMAGE=python:3.12-slim --build-arg LOCK=cpu .
# docker run --gpus all --ipc host --ulimit memlock=-1 -v $PWD:/work -w /work megatron-dapo train run.yaml
# The image has the CUDA compiler, with which Transformer Engine's extension is built, and no cuDNN: torch brings its own.
ARG BASE_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE_IMAGE}
ARG LOCK=cuda13
COPY . /opt/megatron-dapo
RUN /opt/megatron-dapo/tools/install.sh "$LOCK" /opt/venv && rm -rf /root/.cache /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH
ENTRYPOINT ["megatron-dapo"]
CMD ["--help"]
