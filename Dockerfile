# allmask on CPUs, for a user without rights. How to build and run it: docs/container.md
FROM python:3.11-slim

# For pip, while the image is built: a mirror, or the index that has torch for CPUs only.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# The image has no other user yet, and needs no virtual environment.
ARG PIP_ROOT_USER_ACTION=ignore

# What torch and the others take: the large layer, made again only when the requirements change.
RUN --mount=type=bind,source=pyproject.toml,target=/src/pyproject.toml \
    --mount=type=bind,source=constraints.txt,target=/src/constraints.txt \
    python -c 'import tomllib; print(*tomllib.load(open("/src/pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > /tmp/requirements.txt \
    && pip install --no-cache-dir -c /src/constraints.txt -r /tmp/requirements.txt \
    && rm /tmp/requirements.txt

# allmask, a Chinese font for its pictures, and the weights. The mount is written to, and what is written is dropped.
RUN --mount=type=bind,target=/src,rw \
    pip install --no-cache-dir -c /src/constraints.txt '/src[zh,serve]' /src/weights/allmask-en /src/weights/allmask-zh

# The C kernels, for all x86 processors; other ones have none. The compiler does not stay. Debian's security fixes
# should be taken as they come, so no version is named.
ENV ALLMASK_KERNELS=/opt/allmask-kernels
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && python -m allmask.kernels.build \
    && apt-get purge -y --auto-remove gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* /root/.cache

# Any user id may run it (docker run --user): the home is everybody's, and needs no entry in /etc/passwd. So is the hub's
# cache: a new volume that is mounted there takes the rights of the folder; without one it would be root's.
RUN useradd --uid 1000 --no-create-home --home-dir /home/allmask allmask \
    && install -d -m 1777 /home/allmask /home/allmask/.cache /home/allmask/.cache/huggingface \
    && install -d -o allmask -g allmask /data
ENV HOME=/home/allmask USER=allmask
USER 1000
WORKDIR /data

ENTRYPOINT ["allmask"]
CMD ["--help"]
