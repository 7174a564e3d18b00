# The image that projects build on: mgpu-tf kubernetes --dockerfile prints theirs.
#   docker build --tag=mgpu-tf:cpu .
#   docker build --tag=mgpu-tf:gpu --build-arg=EXTRAS=gpu .
FROM python:3.12-slim

# Such as gpu, or gpu,ray: the extras of setup.cfg.
ARG EXTRAS=

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 HOME=/tmp

WORKDIR /packages/mgpu_tf
COPY LICENSE README.md pyproject.toml setup.cfg ./
COPY mgpu_tf mgpu_tf
RUN pip install ".${EXTRAS:+[$EXTRAS]}"

WORKDIR /project
USER 1000
CMD ["mgpu-tf", "help"]
