# Not built or run by us yet: there was no container engine where it was written. See docs/serving.md.
FROM python:3.12-slim

# Triton compiles a small launcher for each kernel when it first runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/thinrank
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# PyPI's torch for Linux brings CUDA's libraries; the driver comes from the host (docker run --gpus all).
RUN pip install --no-cache-dir --constraint constraints.txt '.[serve,grammar]'

RUN useradd --create-home thinrank
USER thinrank
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]

ENTRYPOINT ["thinrank"]
CMD ["serve", "--help"]
