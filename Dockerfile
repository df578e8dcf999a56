# Server for one NVIDIA GPU:
#   docker build -t glm5 .
#   docker run --gpus all -p 8000:8000 -v "$HOME/.cache/huggingface:/models" glm5 zai-org/GLM-5-FP8
# torch's wheels bring the CUDA libraries, so the host needs only a driver and the NVIDIA container toolkit.
FROM python:3.12-slim

# Triton compiles its launchers with a C compiler when the first kernel starts.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/glm5
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY glm5 glm5
RUN pip install --no-cache-dir --constraint constraints.txt '.[serve,gpu,grammar,otel]'

ENV HF_HOME=/models PYTHONUNBUFFERED=1
VOLUME /models
EXPOSE 8000
ENTRYPOINT ["glm5", "serve", "--host", "0.0.0.0"]
CMD ["--help"]
