# Server for one NVIDIA GPU:
#   docker build -t glm5 .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -e GLM5_API_KEY -v "$PWD/runs/demo/model:/demo:ro" glm5 /demo
# A hub id stands in for /demo; what is downloaded stays in the volume /models.
# torch's wheels bring the CUDA libraries, so the host needs only a driver and the NVIDIA container toolkit.
FROM python:3.12-slim

# Triton compiles its launchers with a C compiler when the first kernel starts.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/glm5
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY glm5 glm5
RUN pip install --no-cache-dir --constraint constraints.txt '.[serve,gpu,otel]'

ENV HF_HOME=/models PYTHONUNBUFFERED=1
VOLUME /models
EXPOSE 8000
# The server says on /health whether the model answers; a large checkpoint may take long to load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["glm5", "serve", "--host", "0.0.0.0"]
CMD ["--help"]
