// The page behind a link to vote: two images, three answers, nothing else. Talks with the routes of kohya_like/vote_links.py, and with no
// other ones.

import { html, render } from "../common/html.js";
import { t, translated } from "../common/language.js";

const place = location.pathname.replace(/\/$/, "");
const main = document.querySelector("main");
const ANSWERS = { 1: "left", 2: "right", 0: "none" };
const TINY_PIXELS = 256; // of a side; below it pixels are shown as they are
const crisp = ({ target }) => target.classList.toggle("tiny", target.naturalWidth < TINY_PIXELS);
const STYLE = `
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 16px; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px; }
.pair img { width: 100%; height: min(62vh, 46vw); object-fit: contain; border-radius: 10px; }
.pair img { background: color-mix(in srgb, CanvasText 7%, Canvas); }
.pair img.tiny { image-rendering: pixelated; }
.row { display: flex; flex-wrap: wrap; gap: 8px; margin-top: 12px; }
button { font: inherit; font-weight: 600; min-height: 44px; padding: 6px 18px; border-radius: 8px; }
[role=alert] { color: light-dark(#b3261e, #ff9b93); }
`;
let question = null; // {number, there}
let note = "";
let busy = false;

async function ask(what, order) {
  const response = await fetch(`${place}/${what}`, order && { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(order) });
  const answer = await response.json();
  if (!response.ok) throw new Error(translated(answer.detail) || t`The studio answered ${response.status}.`);
  return answer;
}

async function give(winner) {
  if (busy || !question || !question.there) return;
  busy = true;
  try {
    question = await ask("answer", { number: question.number, winner });
    note = "";
  } catch (error) {
    note = error.message;
    question = await ask("question").catch(() => question);
  }
  busy = false;
  draw();
}

function side(which, text) {
  return html`<img onLoad=${crisp} key=${`${question.number} ${which}`} src=${`${place}/image/${question.number}/${which}`} alt=${text} />`;
}

function asked() {
  return html`<div class="pair">${side("left", t`Image 1`)}${side("right", t`Image 2`)}</div>
    <div class="row">${[["1", t`Image 1`], ["2", t`Image 2`], ["0", t`No difference`]].map(([key, text]) => html`<button type="button" onClick=${() => give(ANSWERS[key])}>${text} <kbd>${key}</kbd></button>`)}</div>`;
}

function draw() {
  document.title = t`Which is better?`;
  const given = question && question.number;
  render(html`<h1>${t`Which is better?`}</h1>
    ${question && (question.there ? asked() : html`<p>${t`There is nothing more to ask. Thank you.`}</p>`)}
    ${note && html`<p role="alert">${note}</p>`}
    ${given ? html`<p role="status">${t`Votes given: ${given}. Thank you; close this page whenever you like.`}</p>` : ""}`, main);
}

addEventListener("keydown", (event) => {
  if (!(event.key in ANSWERS) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  give(ANSWERS[event.key]);
});

document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }));
try {
  question = await ask("enter", {});
} catch (error) {
  note = error.message;
}
draw();
