// Two images of a grid, without a word about what made them: which is better? Keys 1, 2 and 0 answer.

import { html } from "../common/html.js";
import { t } from "../common/language.js";
import { copier, sharp } from "../common/page.js";
import { ask, post } from "../common/studio.js";
import { plural } from "../common/words.js";

const LOOPBACK = /^(localhost|127\.|\[::1\])/;
const ANSWERS = { 1: "left", 2: "right", 0: "none" };
const crisp = (image) => image && sharp(image);
const percent = (share) => `${Math.round(100 * share)} %`;

export class Vote {
  // drawn() shows what is here anew; url(row, column, size) is the address of an image.
  constructor({ drawn, url }) {
    this.drawn = drawn;
    this.url = url;
    this.close();
  }

  close() {
    this.place = ""; // address of the grid's votes; "" while nobody votes
    this.answer = null;
    this.note = "";
    this.open = false; // the ranking is shown
    this.link = ""; // for somebody else
  }

  async begin(place) {
    this.close();
    this.place = place;
    try {
      this.answer = await ask(place);
    } catch (error) {
      this.note = error.message;
    }
    this.drawn();
  }

  async give(winner) {
    const { pair } = this.answer;
    try {
      this.answer = await post(this.place, { ...pair, winner });
      this.note = "";
    } catch (error) {
      this.note = error.message;
      this.answer = await ask(this.place);
    }
    this.drawn();
  }

  async invite() {
    try {
      const { path, problems } = await post(this.place.replace(/vote$/, "invite"), {});
      this.note = (problems || []).map(({ message }) => message).join(" ");
      if (path) this.link = `${location.origin}${path}`;
    } catch (error) {
      this.note = error.message;
    }
    this.drawn();
  }

  // A link for somebody else, where somebody else can reach the studio.
  others() {
    if (!this.answer.invites) return null;
    const more = html`<button type="button" class="kl-button" onClick=${() => this.invite()}>${this.link ? t`Another link` : t`Let somebody else vote`}</button>`;
    if (!this.link) return html`<div class="kl-row">${more}</div>`;
    const mine = LOOPBACK.test(location.hostname) ? t` Only this computer understands ${location.hostname}: put the address in its place under which others reach the studio.` : "";
    return html`<div><label for="kl-vote-link">${t`A link for one person`}</label>
      <div class="kl-row"><input type="text" id="kl-vote-link" readonly value=${this.link} aria-describedby="kl-vote-link-help" onFocus=${({ target }) => target.select()} /><span ref=${(place) => place && place.replaceChildren(copier(() => this.link, t`Copy the link`))}></span>${more}</div>
      <p class="kl-help" id="kl-vote-link-help">${t`It opens in one browser, shows images and nothing else, and ends after a day or with this studio.`}${mine}</p></div>`;
  }

  key(event) {
    if (!(event.key in ANSWERS) || !this.answer || !this.answer.pair || event.target.matches("input")) return;
    event.preventDefault();
    this.give(ANSWERS[event.key]);
  }

  verdict() {
    const { ranking, clear, votes } = this.answer;
    if (!votes) return "";
    return clear ? t`Enough votes: ${ranking[0].label} is better than the others.` : t`Not enough votes yet to tell which one is best.`;
  }

  ranking() {
    return html`<table class="kl-table"><thead><tr><th>${t`Column`}</th><th>${t`Won`}</th><th>${t`95 % interval`}</th><th>${t`Votes`}</th></tr></thead>
      <tbody>${this.answer.ranking.map(({ label, share, low, high, votes }) => html`<tr><td>${label}</td><td>${votes ? percent(share) : "–"}</td><td>${votes ? t`${percent(low)} to ${percent(high)}` : "–"}</td><td>${votes}</td></tr>`)}</tbody></table>`;
  }

  view(leave) {
    const back = html`<button type="button" class="kl-quiet" onClick=${leave}>${t`Back to the grid`}</button>`;
    const note = this.note && html`<p class="kl-error" role="alert">${this.note}</p>`;
    if (!this.answer) return html`${note}<div class="kl-row">${back}</div>`;
    const { pair, votes, prompt } = this.answer;
    const side = (column, text) => html`<div class="kl-compare-frame"><img ref=${crisp} key=${`${votes} ${column}`} src=${this.url(pair.row, column, "full")} alt=${text} /></div>`;
    return html`<div class="kl-vote" tabindex="-1" onKeyDown=${(event) => this.key(event)}>
      ${pair ? html`<p>${t`Which is better?`} <span class="kl-note">${t`Nobody is told what made them; keys 1, 2 and 0 answer.`}</span></p><p class="kl-vote-prompt">${prompt}</p>
        <div class="kl-vote-pair">${side(pair.left, t`Image 1`)}${side(pair.right, t`Image 2`)}</div>
        <div class="kl-row">${[["1", t`Image 1`], ["2", t`Image 2`], ["0", t`No difference`]].map(([key, text]) => html`<button type="button" class="kl-button" onClick=${() => this.give(ANSWERS[key])}>${text} <kbd>${key}</kbd></button>`)}</div>`
        : html`<p class="kl-note">${t`No row has two images yet.`}</p>`}
      ${note}<p class="kl-note" role="status">${[plural(votes, "vote", "votes"), this.verdict()].filter(Boolean).join(" · ")}</p>
      <details open=${this.open} onToggle=${(event) => (this.open = event.currentTarget.open)}><summary>${t`Ranking`}</summary>${this.ranking()}</details>
      ${this.others()}
      <div class="kl-row">${back}</div></div>`;
  }
}
