// Talks to the server; the address of the page holds the token, so that paths below it do too.

const PATIENCE = 8000; // milliseconds to wait for an answer

export class Lost extends Error {}

export async function ask(path, body) {
  const options = { cache: body ? "no-store" : "default", signal: AbortSignal.timeout(PATIENCE) };
  if (body) {
    Object.assign(options, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  }
  let answer;
  try {
    answer = await fetch(path, options);
    const text = await answer.text();
    const isJson = (answer.headers.get("content-type") || "").startsWith("application/json");
    return { status: answer.status, value: isJson ? JSON.parse(text) : { error: text.trim() } };
  } catch (error) {
    throw new Lost(String(error));
  }
}

// What was decided and may not have arrived: kept over a reload, and sent again under the same key.
const KEY = `pending ${location.pathname}`;

export const pending = {
  read() {
    try { return JSON.parse(sessionStorage.getItem(KEY)); } catch { return null; }
  },
  write(value) {
    if (value) sessionStorage.setItem(KEY, JSON.stringify(value));
    else sessionStorage.removeItem(KEY);
  },
};

export function newKey() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(36)).join("-");
}
