// Requests to the server of this page.

/** An error that the server explains: what is wrong, and what to do. */
export class Problem extends Error {
  constructor(detail, hint) {
    super(detail);
    this.hint = hint ?? "";
  }
}

async function answered(response) {
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  throw new Problem(found.detail ?? `HTTP ${response.status}`, found.hint);
}

async function send(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  try {
    return await answered(await fetch(`/play/api/${path}`, { method: "POST", headers, body: JSON.stringify(body), signal }));
  } catch (error) {
    if (error instanceof TypeError) throw new Problem("the server does not answer", "is `allmask play` still running?");
    throw error;
  }
}

export const post = async (path, body, signal) => (await send(path, body, signal)).json();
export const postForFile = async (path, body) => (await send(path, body)).blob();
export const get = async (path) => (await answered(await fetch(`/play/api/${path}`))).json();

/** Calls of which only the latest counts: an earlier one that is still waiting is given up. */
export function latest(path) {
  let current;
  return async (body) => {
    current?.abort();
    current = new AbortController();
    try {
      return await post(path, body, current.signal);
    } catch (error) {
      if (error.name === "AbortError") return null;
      throw error;
    }
  };
}
