// How the page talks with its studio.

import { t, translated } from "./language.js";

let token = ""; // only a page of this start of the studio has it

export function enter(given) {
  token = given || "";
}

export const address = (run, rest = "") => `/kl/run/${encodeURIComponent(run)}${rest}`;
export const withToken = (path, more = "") => `${path}?token=${encodeURIComponent(token)}${more}`;

export const headers = () => ({ "x-kl-token": token });

export class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  if (response.status === 401) reloadOnce();
  const answer = await response.json();
  if (!response.ok) throw new Refused(response.status, translated(answer.detail) || t`The studio answered ${response.status}.`);
  return answer;
}

export const post = (path, order) => ask(path, { method: "POST", body: JSON.stringify(order) });

// A studio that was started again has a new token, and only a fresh page has it.
function reloadOnce() {
  const before = Number(sessionStorage.getItem("kl.reloaded") || 0);
  if (Date.now() - before < 15000) return;
  sessionStorage.setItem("kl.reloaded", String(Date.now()));
  location.reload();
}

function seen(node) {
  return node.isConnected && node.offsetParent !== null && !document.hidden;
}

/**
 * Calls `work` again and again; it returns the seconds until the next time. Nothing is asked while the node cannot be seen.
 * @param {HTMLElement} node
 * @param {() => number | Promise<number>} work
 * @returns {() => Promise<void>} calls it now, or once more where it is at work already and what it asked may be out of date
 */
export function repeat(node, work) {
  let timer = null;
  let now = null;
  let next = null;
  async function once() {
    clearTimeout(timer);
    const pause = seen(node) ? await work() : 0.5;
    timer = setTimeout(turn, 1000 * pause);
  }
  function turn() {
    if (!now) return (now = once().finally(() => (now = null)));
    next ??= now.then(() => {
      next = null;
      return turn();
    });
    return next;
  }
  document.addEventListener("visibilitychange", () => !document.hidden && turn());
  turn();
  return turn;
}

/**
 * Hears an answer that comes line by line, each a JSON text.
 * @param {Response} response
 * @param {(said: any) => void} hear
 */
export async function eachLine(response, hear) {
  if (!response.ok) throw new Error(t`The studio answered ${response.status}.`);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += decoder.decode(value || new Uint8Array(), { stream: !done });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines.filter(Boolean)) hear(JSON.parse(line));
    if (done) return;
  }
}
