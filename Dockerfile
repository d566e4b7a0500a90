# onnxline on the CPU.
#   docker build -t onnxline .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" onnxline run config.yaml        # artifacts: runs/ of the working directory

FROM python:3.11-slim AS build
WORKDIR /src
RUN python -m venv /opt/onnxline
ENV PATH=/opt/onnxline/bin:$PATH
COPY constraints.txt ./
# torch alone from its own index, whose wheels have no CUDA; what torch needs comes with the rest, since that index has few
# releases of it. Before the sources, so that it is kept when they change.
RUN pip install --no-cache-dir --no-deps -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
COPY pyproject.toml README.md LICENSE ./
COPY onnxline onnxline
COPY passes passes
COPY pipeline pipeline
# From the wheel, as from PyPI: a file that the wheel lacks would be missing here too.
RUN pip wheel --no-cache-dir --no-deps -w /dist . \
    && pip install --no-cache-dir -c constraints.txt "$(ls /dist/onnxline-*.whl)[torch,onnxslim]"

FROM python:3.11-slim
# OpenMP for onnxruntime and torch.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/onnxline /opt/onnxline
ENV PATH=/opt/onnxline/bin:$PATH
RUN useradd --create-home onnxline
USER onnxline
WORKDIR /work
ENTRYPOINT ["onnxline"]
CMD ["--help"]
