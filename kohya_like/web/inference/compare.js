// Grids of images: checkpoints and strengths beside each other, prompts and seeds below one another. A click shows an image large, and the
// arrow keys go from there to its neighbours. Talks with the routes of kohya_like/comparison_routes.py.

import { html, render } from "../common/html.js";
import { t } from "../common/language.js";
import { bring, find, make, sharp } from "../common/page.js";
import { store, stored } from "../common/stored.js";
import { ask, repeat, withToken } from "../common/studio.js";
import { duration, moment } from "../common/words.js";
import { byPrompt, neighbour } from "./cells.js";
import { Pick } from "./pick.js";
import { Vote } from "./vote.js";

const ZOOM = "kl.compare.zoom";
const STATES = { done: t`Complete`, running: t`Drawing`, waiting: t`Waits for another comparison`, stopped: t`Not complete` };
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
const place = (name, rest = "") => `/kl/compare/${encodeURIComponent(name)}${rest}`;
const crispAlone = (image) => image && sharp(image);
const crisp = (image) => image && sharp(image, image.parentElement);

export class Compare {
  constructor() {
    this.root = make("section", { class: "kl-card kl-compare", "aria-label": t`Comparison`, hidden: true });
    this.dialog = make("dialog", { class: "kl-compare-large", "aria-label": t`One image of the comparison` });
    this.dialog.addEventListener("close", () => this.change({ at: null }));
    this.dialog.addEventListener("keydown", (event) => this.key(event));
    this.list = [];
    this.name = "";
    this.answer = null; // the grid that is shown
    this.at = null; // {row, column} of the image that is shown large
    this.holdsBase = false; // the base is shown in place of it
    this.zoom = stored(ZOOM) || 160;
    this.note = "";
    this.sure = false;
    this.vote = new Vote({ drawn: () => this.draw(), url: (row, column, size) => this.url(row, column, size) });
    this.pick = new Pick({ drawn: () => this.draw() });
    this.poll = repeat(this.root, () => this.follow());
  }

  change(what) {
    Object.assign(this, what);
    this.draw();
  }

  async beginVote() {
    await this.vote.begin(place(this.name, "/vote"));
    find(this.root, ".kl-vote").focus({ preventScroll: true });
  }

  togglePick() {
    if (this.pick.place) this.pick.close();
    else this.pick.open(place(this.name));
    this.draw();
  }

  endVote() {
    this.vote.close();
    this.draw();
  }

  async open(name = "") {
    this.vote.close();
    this.pick.close();
    this.change({ name: name || this.name, note: "" });
    await this.poll();
    bring(this.root);
  }

  async follow() {
    try {
      this.list = (await ask("/kl/compare")).comparisons;
      if (!this.list.some(({ name }) => name === this.name)) this.name = this.list.length ? this.list[0].name : "";
      const before = this.name;
      const answer = before ? await ask(place(before)) : null;
      if (before === this.name) this.answer = answer;
    } catch (error) {
      this.note = error.message;
    }
    this.draw();
    return this.list.some(({ state }) => state === "running" || state === "waiting") ? 1 : 8;
  }

  async act(what) {
    try {
      const answer = await ask(place(this.name, `/${what}`), { method: "POST" });
      this.note = (answer.problems || []).map(({ message }) => message).join(" ");
    } catch (error) {
      this.note = error.message;
    }
    this.sure = false;
    await this.poll();
  }

  // ---- the image that is shown large

  show(at) {
    this.change({ at, holdsBase: false });
    if (!this.dialog.open) this.dialog.showModal();
  }

  key(event) {
    if (!this.at) return;
    if (MOVES[event.key]) {
      event.preventDefault();
      this.show(neighbour(this.answer.there, this.at, MOVES[event.key]));
    } else if (event.key === "b" && this.base() >= 0) this.change({ holdsBase: !this.holdsBase });
  }

  base() {
    return this.answer.columns.findIndex(({ is_base: isBase }) => isBase);
  }

  url(row, column, size) {
    return withToken(place(this.answer.name, `/cell/${this.answer.keys[row][column]}`), `&size=${size}`);
  }

  words(row, column) {
    const { rows, columns } = this.answer;
    return t`${columns[column].label}: ${rows[row].prompt}, seed ${rows[row].seed}`;
  }

  large() {
    if (!this.at) return null;
    const { row } = this.at;
    const column = this.holdsBase ? this.base() : this.at.column;
    const go = (move, text, label) => html`<button type="button" class="kl-button" aria-label=${label} onClick=${() => this.show(neighbour(this.answer.there, this.at, MOVES[move]))}>${text}</button>`;
    return html`<div class="kl-compare-frame"><img ref=${crispAlone} key=${`${row} ${column}`} src=${this.url(row, column, "full")} alt=${this.words(row, column)} /></div>
      <p><strong>${this.answer.columns[column].label}</strong> · ${t`seed ${this.answer.rows[row].seed}`}<br />${this.answer.rows[row].prompt}</p>
      <div class="kl-row">${go("ArrowLeft", "←", t`The column before`)}${go("ArrowRight", "→", t`The next column`)}${go("ArrowUp", "↑", t`The row above`)}${go("ArrowDown", "↓", t`The row below`)}
        ${this.base() >= 0 && html`<button type="button" class="kl-button" aria-pressed=${String(this.holdsBase)} onClick=${() => this.change({ holdsBase: !this.holdsBase })}>${t`Base (B)`}</button>`}
        <button type="button" class="kl-button" onClick=${() => this.dialog.close()}>${t`Close`}</button></div>`;
  }

  // ---- the grid

  cell(row, column) {
    if (!this.answer.there[row][column]) return html`<td><span class="kl-compare-blank" role="img" aria-label=${t`Not drawn yet: ${this.words(row, column)}`}></span></td>`;
    return html`<td><button type="button" class="kl-compare-cell" aria-label=${this.words(row, column)} data-row=${row} data-column=${column} onClick=${() => this.show({ row, column })}>
      <span><img ref=${crisp} src=${this.url(row, column, "full")} alt="" loading="lazy" /></span></button></td>`;
  }

  // Arrow keys go over the images of the grid, too.
  step(event) {
    const from = event.target.closest("[data-row]");
    if (!MOVES[event.key] || !from) return;
    event.preventDefault();
    const { row, column } = neighbour(this.answer.there, { row: Number(from.dataset.row), column: Number(from.dataset.column) }, MOVES[event.key]);
    find(this.root, `[data-row="${row}"][data-column="${column}"]`).focus();
  }

  table() {
    const { columns, rows } = this.answer;
    return html`<div class="kl-compare-scroll" role="region" tabindex="0" aria-label=${t`Images by checkpoint and prompt`} style=${`--kl-cell: ${this.zoom}px`} onKeyDown=${(event) => this.step(event)}>
      <table><thead><tr>${columns.map(({ label }) => html`<th scope="col">${label}</th>`)}</tr></thead>
      ${byPrompt(rows).map((group) => html`<tbody><tr><th scope="rowgroup" colspan=${columns.length}><span>${group.prompt}</span></th></tr>
        ${group.rows.map((row) => html`<tr>${columns.map((_, column) => this.cell(row, column))}</tr>`)}</tbody>`)}</table></div>`;
  }

  head() {
    const { state, done, total, left, phase } = this.answer;
    const busy = state === "running" || state === "waiting";
    const parts = [STATES[state], t`${done} of ${total} images`, busy ? phase : "", left ? t`about ${duration(left)} left` : ""];
    const save = (kind, text) => html`<a class="kl-button" href=${withToken(place(this.name, `/file.${kind}`))} download>${text}</a>`;
    return html`<div class="kl-compare-head">
      <label><span>${t`Comparison`}</span> <select id="kl-compare-which" value=${this.name} onChange=${(event) => this.open(event.currentTarget.value)}>
        ${this.list.map(({ name, title, time }) => html`<option value=${name} selected=${name === this.name}>${title} · ${moment(1000 * time)}</option>`)}</select></label>
      <label><span>${t`Size`}</span> <input type="range" id="kl-compare-zoom" min="64" max="512" step="16" value=${this.zoom} aria-valuetext=${t`${this.zoom} px`} onInput=${(event) => {
        this.change({ zoom: Number(event.currentTarget.value) });
        store(ZOOM, this.zoom);
      }} /></label></div>
      <p class="kl-note" role="status">${parts.filter(Boolean).join(" · ")}</p>
      ${(this.note || this.answer.said) && html`<p class="kl-error" role="alert">${this.note || this.answer.said}</p>`}
      <div class="kl-row">${busy && html`<button type="button" class="kl-button" onClick=${() => this.act("stop")}>${t`Stop`}</button>`}
        ${state === "stopped" && html`<button type="button" class="kl-button kl-strong" onClick=${() => this.act("continue")}>${t`Continue`}</button>`}
        ${done > 1 && html`<button type="button" class="kl-button" onClick=${() => this.beginVote()}>${t`Blind vote`}</button>`}
        ${done > 1 && html`<button type="button" class="kl-button" aria-expanded=${String(Boolean(this.pick.place))} onClick=${() => this.togglePick()}>${t`Numbers and pick`}</button>`}
        ${done > 0 && save("html", t`Save as HTML`)}${done > 0 && save("png", t`Save as PNG`)}
        ${this.sure ? html`<button type="button" class="kl-button" onClick=${() => this.act("delete")}>${t`Delete these images`}</button><button type="button" class="kl-quiet" onClick=${() => this.change({ sure: false })}>${t`Keep them`}</button>`
          : html`<button type="button" class="kl-quiet" onClick=${() => this.change({ sure: true })}>${t`Delete`}</button>`}</div>`;
  }

  draw() {
    render(html`<h2>${t`Grids`}</h2>${this.answer ? (this.vote.place ? this.vote.view(() => this.endVote()) : html`${this.head()}${this.pick.view()}${this.table()}`)
      : html`<p class="kl-note kl-inf-empty">${this.note || t`Nothing is compared yet. Choose what to draw with, open “What is compared” there, and press Compare.`}</p>`}`, this.root);
    render(this.large(), this.dialog);
    if (!this.dialog.isConnected) this.root.after(this.dialog);
  }
}
