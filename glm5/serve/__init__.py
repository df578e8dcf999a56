"""HTTP in front of an engine: OpenAI's chat completions, models, health.

app      the application, put together     chat    POST /v1/chat/completions    models   GET /v1/models and /health
service  what the routes work with         wire    request body, answer chunks  errors   OpenAI's error envelope
disconnect   a client that leaves takes its request along                       server   listening and shutting down
pages    chat and dashboard for people, from page/
"""
