"""/openapi.json, made from the registry and the declared options, and /docs, the same as a page without scripts."""

from __future__ import annotations

import html
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import allmask
from allmask.options import described
from allmask.serve.tasks import as_json, options_of
from allmask.tasks.task import Predictor

TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
PROBLEM = {"$ref": "#/components/schemas/Problem"}
MODEL = {"type": "string", "description": "A name of GET /v1/models; without it, the first that can do the task."}
STATUSES = {
    "400": "The body is not JSON.", "401": "The key is missing or wrong.", "404": "There is no such model or task.",
    "413": "The body is too large.", "422": "An input or an option is wrong.", "429": "The queue is full.",
    "504": "No result in time.",
}  # fmt: skip


def openapi(models: Any) -> dict[str, Any]:
    """Return the description of a server with these models."""
    tasks: dict[str, Predictor] = {}
    for model in models.values():
        tasks = {**model.predictors, **tasks}
    paths: dict[str, Any] = {}
    for name, predictor in tasks.items():
        anything = {"oneOf": [{"type": "string"}, {"type": "object"}]}
        one_or_more = {"oneOf": [*anything["oneOf"], {"type": "array", "items": anything}]}
        fields = {"model": MODEL, "input": {**one_or_more, "description": "One input, or a list."}}
        body = _object({**fields, **_options(predictor)}, ["input"])
        summary = f'The task "{name}": this model {predictor.does}.'
        paths[f"/v1/tasks/{name}"] = {"post": _operation(summary, body, "What allmask predict writes, as `output`.")}
    if "embed" in tasks:
        fields = {"model": MODEL, "input": _texts("The texts."), **_options(tasks["embed"])}
        fields["encoding_format"] = {"type": "string", "enum": ["float", "base64"]}
        summary = "Vectors of texts, for clients of OpenAI."
        body = _object(fields, ["model", "input"])
        paths["/v1/embeddings"] = {"post": _operation(summary, body, "`data`, with an `embedding` for each text.")}
    if "generate" in tasks:
        fields = {"model": MODEL, "prompt": _texts("The sources, or texts to continue."), **_options(tasks["generate"])}
        more = {"max_tokens": "integer", "n": "integer", "stream": "boolean"}
        fields |= {name: {"type": kind} for name, kind in more.items()}
        summary = "Text for prompts, for clients of OpenAI; with `stream`, as server-sent events."
        body = _object(fields, ["model", "prompt"])
        paths["/v1/completions"] = {"post": _operation(summary, body, "`choices`, with the `text` for each prompt.")}
    for path, summary in (
        ("/v1/models", "The models and their tasks."), ("/health", "The process lives."),
        ("/ready", "Requests are welcome; 503 once the server stops."), ("/metrics", "Metrics for Prometheus."),
    ):  # fmt: skip
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": summary}}}}
    problem = {name: {"type": "string"} for name in ("type", "title", "detail", "hint", "kind")}
    schemas = {"Problem": _object({**problem, "status": {"type": "integer"}}, ["title", "status", "detail"])}
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0", "info": {"title": "allmask", "version": allmask.__version__}, "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": key}}, "security": [{}, {"key": []}],
    }  # fmt: skip


def _texts(description: str) -> dict[str, Any]:
    one = {"type": "string"}
    return {"oneOf": [one, {"type": "array", "items": one}], "description": description}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _operation(summary: str, body: dict[str, Any], result: str) -> dict[str, Any]:
    problems = {
        status: {"description": text, "content": {"application/problem+json": {"schema": PROBLEM}}}
        for status, text in STATUSES.items()
    }
    answer = {"description": result, "content": {"application/json": {"schema": {"type": "object"}}}}
    content = {"application/json": {"schema": body}}
    return {"summary": summary, "requestBody": {"required": True, "content": content},
            "responses": {"200": answer, **problems}}  # fmt: skip


def _options(predictor: Predictor) -> dict[str, Any]:
    """Return the options of a predictor as properties of a JSON schema."""
    found = {}
    for name, (entry, kind) in options_of(predictor).items():
        declared = described(entry)
        limits = {
            "minimum": declared.minimum, "maximum": declared.maximum, "exclusiveMinimum": declared.above,
            "exclusiveMaximum": declared.below, "enum": list(declared.choices) or None,
            "default": None if declared.shown_default else entry.default,
        }  # fmt: skip
        schema = {"type": TYPES[kind], "description": declared.help}
        found[name] = schema | {key: value for key, value in limits.items() if value is not None}
    return found


async def get_openapi(request: Request) -> Response:
    return as_json(openapi(request.app.state.models))


# ---- the page ----------------------------------------------------------------------------------------------------

HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>allmask: the HTTP interface</title>
<style>
  :root { color-scheme: light dark }
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
  code, pre { font-family: ui-monospace, monospace }
  pre { overflow-x: auto; padding: .75rem; border: 1px solid #8886; border-radius: .4rem }
  table { border-collapse: collapse; width: 100% } th, td { text-align: left; vertical-align: top; padding: .3rem .6rem;
  border-bottom: 1px solid #8886 } summary { cursor: pointer; font-weight: 600; padding: .4rem 0 }
</style>
<main>
<h1>allmask: the HTTP interface</h1>
<p>For programs: <a href="openapi.json">openapi.json</a>. Errors are <code>application/problem+json</code>.</p>
"""


async def get_docs(request: Request) -> Response:
    described = openapi(request.app.state.models)
    base = str(request.base_url).rstrip("/")
    parts = [HEAD]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(_section(base, path, method.upper(), operation))
    return HTMLResponse("".join([*parts, "</main>\n</html>\n"]))


def _section(base: str, path: str, method: str, operation: dict[str, Any]) -> str:
    line, rows = f"curl {base}{path}", ""
    if "requestBody" in operation:
        properties = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
        example = {"prompt" if "prompt" in properties else "input": "北京欢迎你 [MASK]" if "top" in properties else "…"}
        line += f" --json '{json.dumps(example, ensure_ascii=False)}'"
        for name, schema in properties.items():
            more = {key: schema[key] for key in ("default", "minimum", "maximum", "enum") if key in schema}
            notes = ", ".join(f"{key}: {json.dumps(value)}" for key, value in more.items())
            cells = (f"<code>{name}</code>", schema.get("type", "text or list"), schema.get("description", ""), notes)
            escaped = [cells[0], *map(html.escape, cells[1:])]
            rows += "<tr>" + "".join(f"<td>{cell}</td>" for cell in escaped) + "</tr>\n"
    table = f"<table>\n<tr><th>field<th>type<th>meaning<th>limits</tr>\n{rows}</table>\n" if rows else ""
    summary, line = html.escape(operation["summary"]), html.escape(line, quote=False)
    title = f"<summary><code>{method} {path}</code></summary>"
    return f"<details>\n{title}\n<p>{summary}</p>\n<pre>{line}</pre>\n{table}</details>\n"
