// Notices when a run ends: of the browser and a sound, which each browser keeps for itself, and an address that the studio writes to. Fetched
// when somebody opens them, or has turned them on.

import { t, translated } from "../common/language.js";
import { make } from "../common/page.js";
import { store, stored } from "../common/stored.js";
import { ask, post } from "../common/studio.js";
import { openDialog } from "../picking/dialog.js";
import { nameOf, stateWords } from "./run.js";

const KEY = "kl.notices";
const PERIOD_MS = 5000;
const ACTIVE = ["running", "queued"];
const wishes = () => stored(KEY) || {};
let watching = false;

// Two short tones, made here: there is no file.
function ring() {
  const audio = new AudioContext();
  [660, 880].forEach((hertz, place) => {
    const tone = audio.createOscillator();
    const volume = audio.createGain();
    const begin = audio.currentTime + 0.18 * place;
    tone.frequency.value = hertz;
    volume.gain.setValueAtTime(0.15, begin);
    volume.gain.exponentialRampToValueAtTime(0.001, begin + 0.3);
    tone.connect(volume).connect(audio.destination);
    tone.start(begin);
    tone.stop(begin + 0.3);
    tone.onended = () => place && audio.close();
  });
}

function tell(run) {
  const { browser, sound } = wishes();
  if (browser && "Notification" in window && Notification.permission === "granted") new Notification(`${nameOf(run)}: ${stateWords(run.state).toLowerCase()}`, { tag: run.name });
  if (sound) ring();
}

// Runs that were under way at the last look and are not any more. states: name -> state, which is brought up to date.
export function ended(states, runs) {
  const found = runs.filter(({ name, state }) => ACTIVE.includes(states.get(name)) && !ACTIVE.includes(state));
  states.clear();
  for (const { name, state } of runs) states.set(name, state);
  return found;
}

// Also while the page is in the background, where the other polls rest.
export function watch() {
  if (watching) return;
  watching = true;
  const states = new Map();
  setInterval(async () => {
    if (!Object.values(wishes()).some(Boolean)) return;
    try {
      ended(states, (await ask("/kl/runs")).runs).forEach(tell);
    } catch (error) {
      console.info("No list of runs for notices:", error.message);
    }
  }, PERIOD_MS);
}

export async function openNotices() {
  const known = await post("/kl/notices/known", {}).catch((error) => ({ url: "", kind: "ntfy", problem: error.message }));
  const status = make("p", { class: "kl-status", role: "status", text: translated(known.problem || "") });
  const say = (text) => (status.textContent = text);
  const attempt = async (work, done) => {
    try {
      await work();
      say(done);
    } catch (error) {
      say(error.message);
    }
  };
  const wish = (name, words, allow) => {
    const box = make("input", { type: "checkbox", id: `kl-notice-${name}` });
    box.checked = Boolean(wishes()[name]);
    box.addEventListener("change", async () => {
      if (box.checked) box.checked = await allow();
      store(KEY, { ...wishes(), [name]: box.checked });
      watch();
    });
    return make("label", { class: "kl-toggle", for: box.id }, box, make("span", { text: words }));
  };
  const allowBrowser = async () => {
    const given = "Notification" in window && (await Notification.requestPermission()) === "granted";
    say(given ? t`This browser tells you when a run ends.` : t`This browser does not allow notifications here: allow them at its address bar; over a network it wants https.`);
    return given;
  };
  const url = make("input", { type: "text", id: "kl-notice-url", autocomplete: "off", spellcheck: "false", placeholder: "https://ntfy.sh/a-name-that-nobody-guesses" });
  const kind = make("select", { id: "kl-notice-kind" }, make("option", { value: "ntfy", text: t`ntfy` }), make("option", { value: "webhook", text: t`webhook (JSON for Slack, Discord and others)` }));
  url.value = known.url;
  kind.value = known.kind;
  const keep = () => post("/kl/notices/keep", { url: url.value, kind: kind.value });
  const test = () => attempt(async () => {
    await keep();
    await post("/kl/notices/test", {});
  }, t`Sent.`);
  const button = (text, work) => make("button", { type: "button", class: "kl-button", text, onclick: work });
  const dialog = openDialog(t`Notices when a run ends`,
    make("div", { class: "kl-row" }, wish("browser", t`Notification of this browser`, allowBrowser), wish("sound", t`Sound in this browser`, async () => (ring(), true))),
    make("p", { class: "kl-note", text: t`As long as a page of this studio is open, also in the background.` }),
    make("h3", { text: t`To an address` }),
    make("div", { class: "kl-field" }, make("label", { for: url.id, text: t`Address` }), url),
    make("div", { class: "kl-field" }, make("label", { for: kind.id, text: t`What takes it` }), kind),
    make("p", { class: "kl-note", text: t`As long as the studio is open. What is sent: that a run has ended, how, and its steps; no name, no path. Who knows the address can read it. Empty ends it.` }),
    status,
    make("div", { class: "kl-row" }, button(t`Keep this address`, () => attempt(keep, url.value.trim() ? t`Kept.` : t`Nothing is sent any more.`)),
      button(t`Send a test`, () => (url.value.trim() ? test() : say(t`Give an address first.`))), button(t`Close`, () => dialog.close())));
}
