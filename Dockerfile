# An image that serves the shipped model, or any other:
#
#   docker build -t srt .
#   docker run --rm -p 30000:30000 srt
#   docker run --rm -p 30000:30000 --gpus all --shm-size 1g -v models:/models srt --model-path Qwen/Qwen3-8B --api-key KEY
#
# For a host without a GPU, let pip find PyTorch's CPU build: --build-arg PIP_OPTIONS="--extra-index-url …" (see docs/usage.md).
FROM python:3.12-slim-bookworm

# The scheduler is compiled with it, and Triton's launchers of kernels.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 srt \
    && install -d -o srt -g srt /models

ARG PIP_OPTIONS=""
COPY setup.py pyproject.toml README.md /source/
COPY benchmarks /source/benchmarks
COPY scripts /source/scripts
COPY srt /source/srt
RUN pip install --no-cache-dir ${PIP_OPTIONS} /source && rm -rf /source

# Downloaded models and compiled kernels: mount a volume, and the next container finds them.
ENV SRT_CACHE_DIR=/models PYTHONUNBUFFERED=1
VOLUME /models
USER srt
WORKDIR /home/srt
EXPOSE 30000
# The first start may download a model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["srt", "health"]
# srt is process 1: it passes SIGTERM on, lets requests finish for up to 25 s, and reaps. Stop it with --time 40.
STOPSIGNAL SIGTERM
# What follows the image's name is added; of an option that comes twice, the last counts.
ENTRYPOINT ["srt", "serve", "--host", "0.0.0.0", "--model-path", "tiny"]
