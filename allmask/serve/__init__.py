"""Models over HTTP: `allmask serve MODEL …` (docs/serve.md).

settings   the options of the server
models     the loaded models: their tasks, their reload
batching   the queue of a model and the thread that computes: what waits together is computed together
tasks      POST /v1/tasks/{task}
openai     /v1/models, /v1/embeddings, /v1/completions
problems   errors as problem+json
metrics    /metrics
docs       /openapi.json and /docs
app        all routes as one ASGI application: make_app(models, settings)
server     the process: sockets, signals, draining; workers, several of them
"""
