// The server's calls: JSON, and completions as streams of server-sent events.

const CUT_OFF = "The connection ended before the answer did.";

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class Server {
  token = "";

  async get(path) {
    return (await this.#call(path, {})).json();
  }

  // Yields the events of a completion; throws ServerError if it is refused, fails, or is cut off.
  async *stream(path, body, signal) {
    const asked = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await this.#call(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(asked),
      signal,
    });
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, response.status);
      yield event;
    }
    throw new ServerError(CUT_OFF, response.status);
  }

  async #call(path, options) {
    const headers = { ...options.headers };
    if (this.token) headers.authorization = `Bearer ${this.token}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached.", 0);
    }
    if (!response.ok) throw await problemOf(response);
    return response;
  }
}

function cutOff(error) {
  if (error.name === "AbortError") throw error;
  throw new ServerError(CUT_OFF, 0);
}

async function problemOf(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // something between us and the server has answered
  }
  const seconds = response.headers.get("retry-after");
  if (seconds) message += ` Try again in ${seconds} s.`;
  return new ServerError(message, response.status);
}

// Yields the data of server-sent events, of which the server writes one line each.
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(cutOff);
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) yield part.replace(/^data: /, "");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
