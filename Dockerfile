# An image for machines with NVIDIA GPUs: camshaft with vLLM, Ray and LoRA.
#
#   docker build -t camshaft .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD:/work" -v "$HOME/.cache/huggingface:/home/user/.cache/huggingface" \
#     --user "$(id -u):$(id -g)" camshaft ppo --help
#
# The driver of the host must support CUDA 13. The torch wheels contain the CUDA libraries; the image adds the compiler
# that Triton and vLLM call at run time. Pass secrets, such as WANDB_API_KEY, with `docker run --env` and not at build
# time.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# The package archive of Ubuntu keeps no older versions, so they are not pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends build-essential python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/camshaft/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/home/user/.cache/huggingface

# torch is installed first, so that its layer is reused when camshaft changes.
RUN python3 -m venv /opt/camshaft \
    && pip install --no-cache-dir "torch==2.13.0" "vllm>=0.32" "ray[default]>=2.50" "peft>=0.18"

COPY pyproject.toml README.md LICENSE /src/
COPY camshaft /src/camshaft
RUN pip install --no-cache-dir "/src[vllm,ray,lora,math,wandb,tensorboard]" \
    && rm -rf /src \
    && camshaft --version

# A user without privileges, by number for Kubernetes' runAsNonRoot; every user may write to its home, so that `docker run --user` works with any id.
RUN useradd --uid 10001 --create-home --shell /bin/bash user \
    && mkdir -p /work "$HF_HOME" \
    && chmod -R a+rwX /home/user /work
COPY --chown=user:user examples /opt/examples
ENV HOME=/home/user
USER 10001
WORKDIR /work

ENTRYPOINT ["camshaft"]
CMD ["--help"]
