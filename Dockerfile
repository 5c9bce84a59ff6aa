# The studio in a container; docs/upkeep.md says how it is built and started.
FROM python:3.12-slim

# Empty: the build of torch that requirements.txt pins, which brings CUDA. Otherwise pip's arguments, such as those of the small build for CPUs.
ARG TORCH_SPEC=""

ENV HOME=/data PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --home-dir /data --create-home studio

WORKDIR /app
# Before the program itself, so that a new version of it does not install everything anew.
COPY setup.sh requirements.txt ./
RUN TORCH_SPEC="$TORCH_SPEC" bash setup.sh install
COPY . .

USER studio
VOLUME /data
EXPOSE 7860
ENTRYPOINT ["bash", "setup.sh", "gui", "--listen", "--server_port", "7860", "--output_dir", "/data/output", "--allowed_dir", "/data"]
