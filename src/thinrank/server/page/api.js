// Calls to the server that this page came from. A request that lacks the right key waits until somebody gives it.

const STORE = "thinrank-api-key"; // in sessionStorage: of this tab, gone when it is closed

let key = sessionStorage.getItem(STORE) ?? "";
let askForKey = null; // async (whether the last one was wrong) => key
let asking = null; // one question at a time

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function whenKeyIsMissing(ask) {
  askForKey = ask;
}

export async function getJSON(path) {
  return (await request(path, {})).json();
}

/** The events of a streamed completion, as objects. Throws ServerError, also for an error amid the stream. */
export async function* streamEvents(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let buffer = "";
  for await (const text of texts(response.body)) {
    const events = (buffer + text).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ServerError(parsed.error.message, null);
      yield parsed;
    }
  }
  throw new ServerError("the connection ended before the answer did", null);
}

async function* texts(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(lost);
      if (done) return;
      yield value;
    }
  } finally {
    await reader.cancel().catch(() => {}); // it may have failed already; whoever reads has been told
  }
}

function lost(error) {
  throw error.name === "AbortError" ? error : new ServerError("the connection was lost", null);
}

async function request(path, options) {
  for (;;) {
    const sent = key;
    const authorization = sent ? { Authorization: `Bearer ${sent}` } : {};
    let response;
    try {
      response = await fetch(path, { ...options, headers: { ...options.headers, ...authorization } });
    } catch (error) {
      throw error.name === "AbortError" ? error : new ServerError("the server cannot be reached", null);
    }
    if (response.status === 401) {
      if (sent === key) await replaceKey();
      continue;
    }
    if (!response.ok) throw new ServerError(await message(response), response.status);
    return response;
  }
}

async function replaceKey() {
  asking ??= askForKey(key !== "").finally(() => (asking = null));
  key = await asking;
  sessionStorage.setItem(STORE, key);
}

async function message(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`; // a proxy's page, say
  }
}
