// What is known of the checkpoints of a grid, which one is proposed and why, and the choice. Talks with kohya_like/pick_routes.py.

import { html } from "../common/html.js";
import { joined, listed, t, translated } from "../common/language.js";
import { ask, post } from "../common/studio.js";
import { bytes, figure, plural } from "../common/words.js";

const BANDS = ["0–¼", "¼–½", "½–¾", "¾–1"];
const mean = (told) => (told ? (told.half === null ? figure(told.value) : `${figure(told.value)} ± ${figure(told.half, 2)}`) : "–");

export class Pick {
  // drawn() shows what is here anew.
  constructor({ drawn }) {
    this.drawn = drawn;
    this.close();
  }

  close() {
    this.place = ""; // address of the grid; "" while this is not shown
    this.answer = null;
    this.note = "";
    this.told = ""; // what was done
    this.leaving = null; // {files, bytes} that somebody is asked about
  }

  async open(place) {
    this.close();
    this.place = place;
    while (this.place === place && !(this.answer && this.answer.ready)) {
      await this.order("", () => ask(`${place}/numbers`), (answer) => (this.answer = answer));
      if (this.note) return;
      await new Promise((resolve) => setTimeout(resolve, 700));
    }
  }

  // Asks, and shows what is wrong in place of what was done.
  async order(told, asked, take) {
    const { place } = this;
    try {
      const answer = await asked();
      if (place !== this.place) return;
      this.note = translated((answer.problems && answer.problems[0] && answer.problems[0].message) || "");
      if (!this.note) {
        take(answer);
        this.told = told;
      }
    } catch (error) {
      this.note = error.message;
    }
    this.drawn();
  }

  choose(column) {
    this.leaving = null;
    return this.order("", () => post(`${this.place}/choose`, { column }), (answer) => (this.answer = answer));
  }

  askToLeave() {
    return this.order("", () => ask(`${this.place}/others`), (answer) => (this.leaving = answer));
  }

  leave() {
    const { files, bytes: size } = this.leaving;
    return this.order(t`Moved to the trash: ${plural(files.length, "file", "files")}. Disk and trash in Runs puts them back, or frees ${bytes(size)}.`, () => post(`${this.place}/delete-others`, { files }), () => (this.leaving = null));
  }

  // Whether a run has measured held-out losses of one of the files.
  isHeldOut() {
    return this.answer.columns.some(({ held_out: held }) => held);
  }

  isToy() {
    return this.answer.columns.some(({ as_asked: asked }) => asked);
  }

  isRated() {
    return this.answer.columns.some(({ rated }) => rated);
  }

  isFaced() {
    return this.answer.columns.some(({ rated }) => rated && (rated.face || rated.faceless));
  }

  // Models that the reader has, which look at the images.
  raters() {
    const { rating, ready } = this.answer;
    const about = { clip_model: t`Prompt: CLIP or SigLIP, a folder or hub id`, image_model: t`Likeness: DINO, CLIP or SigLIP, a folder or hub id`, face_model: t`Faces: what finds them (DETR, YOLOS), a folder or hub id`, face_likeness_model: t`Faces: what compares them, a file in ONNX (ArcFace), a folder or hub id` };
    const send = (event) => {
      event.preventDefault();
      const given = Object.fromEntries(new FormData(event.target));
      if (![...Object.values(given), ...Object.values(rating)].some((text) => text.trim())) {
        this.note = t`Name a model first, for the prompt or for the likeness.`;
        this.drawn();
        return;
      }
      this.order("", () => post(`${this.place}/rate`, given), () => this.open(this.place));
    };
    return html`<details class="kl-tool-more"><summary>${t`Rate the images by models`}</summary><form class="kl-pick-raters" onSubmit=${send}>
      ${Object.entries(about).map(([name, text]) => html`<label>${text}<input type="text" name=${name} id=${`kl-pick-${name}`} defaultValue=${rating[name]} autocomplete="off" spellcheck="false" /></label>`)}
      <button type="submit" class="kl-button" disabled=${!ready}>${t`Rate`}</button></form>
      <p class="kl-note">${t`They look on the CPU, once for each image; what they say is kept. Prompt: the cosine of an image and its prompt. Likeness: the mean of the cosines with up to 200 training images. Faces: the same of the largest face of each image; where none is found is counted. They are shown alone; the proposal does not use them.`}</p></details>`;
  }

  row(column, place) {
    const { proposal, chosen } = this.answer;
    const { label, file, held_out: held, near, as_asked: asked, rated } = column;
    const cell = (words, value) => html`<td data-words=${words}>${value}</td>`; // the words stand there where the window is narrow
    const mark = listed([file && file === chosen ? t`chosen` : "", place === proposal.column ? t`proposed` : ""]);
    return html`<tr><th scope="row"><div class="kl-pick-column"><div>${label}${mark && html` <strong class="kl-pick-mark">${mark}</strong>`}</div>
      ${file && file !== chosen && html`<button type="button" class="kl-button" aria-label=${t`Choose ${label}`} onClick=${() => this.choose(place)}>${t`Choose`}</button>`}</div></th>
      ${this.isHeldOut() && [t`all`, ...BANDS].map((band, place) => cell(t`loss, ${band}`, mean(held && [held.mean, ...held.bands][place])))}
      ${cell(t`distance`, near ? figure(near.distance, 3) : "–")}${cell(t`near copies`, near ? t`${near.copies} of ${near.count}` : "–")}
      ${this.isRated() && [cell(t`prompt`, mean(rated && rated.prompt)), cell(t`likeness`, mean(rated && rated.likeness))]}
      ${this.isFaced() && [cell(t`face`, mean(rated && rated.face)), cell(t`no face`, rated ? rated.faceless : "–")]}
      ${this.isToy() && cell(t`As asked`, asked ? t`${asked.right} of ${asked.count}` : "–")}</tr>`;
  }

  end() {
    const { chosen } = this.answer;
    if (!chosen) return null;
    if (!this.leaving) return html`<div class="kl-row"><button type="button" class="kl-quiet" onClick=${() => this.askToLeave()}>${t`Delete the others`}</button></div>`;
    const { files, bytes: size } = this.leaving;
    if (!files.length) return html`<p class="kl-note">${t`The run has saved nothing besides ${chosen}.`}</p>`;
    return html`<p class="kl-note" role="alert">${files.join(", ")}: ${bytes(size)}. ${t`They can be put back for 30 days. Images of this grid stay; it cannot be continued meanwhile.`}</p>
      <div class="kl-row"><button type="button" class="kl-button" onClick=${() => this.leave()}>${t`Move ${plural(files.length, "file", "files")} to the trash`}</button>
      <button type="button" class="kl-quiet" onClick=${() => {
        this.leaving = null;
        this.drawn();
      }}>${t`Keep the others`}</button></div>`;
  }

  view() {
    if (!this.place) return null;
    const note = this.note && html`<p class="kl-error" role="alert">${this.note}</p>`;
    if (!this.answer) return html`<section class="kl-pick" aria-label=${t`Numbers and pick`}>${note}</section>`;
    const { ready, says, problems, columns, proposal, chosen, run } = this.answer;
    const status = ready ? joined([translated(proposal.why), chosen && t`Chosen in ${run}: ${chosen}.`, this.told]) : `${translated(says)} …`;
    return html`<section class="kl-pick" aria-label=${t`Numbers and pick`}><p role="status">${status}</p>${note}
      ${problems.map((text) => html`<p class="kl-note">${translated(text)}</p>`)}
      <div class="kl-pick-scroll" role="region" tabindex="0" aria-label=${t`Numbers by checkpoint`}><table class="kl-table"><thead>
        <tr><th rowspan="2" scope="col">${t`Column`}</th>${this.isHeldOut() && html`<th colspan="5" scope="colgroup">${t`Held-out loss, all and by noise level`}</th>`}<th colspan="2" scope="colgroup">${t`Training images`}</th>${this.isRated() && html`<th colspan=${this.isFaced() ? 4 : 2} scope="colgroup">${t`By models`}</th>`}${this.isToy() && html`<th rowspan="2" scope="col">${t`As asked`}</th>`}</tr>
        <tr>${this.isHeldOut() && [t`all`, ...BANDS].map((band) => html`<th scope="col">${band}</th>`)}<th scope="col">${t`distance`}</th><th scope="col">${t`near copies`}</th>${this.isRated() && html`<th scope="col">${t`prompt`}</th><th scope="col">${t`likeness`}</th>`}${this.isFaced() && html`<th scope="col">${t`face`}</th><th scope="col">${t`no face`}</th>`}</tr></thead>
        <tbody>${columns.map((column, place) => this.row(column, place))}</tbody></table></div>
      <p class="kl-note">${this.isHeldOut() && t`Losses with their 95 % interval, on the same noise for every checkpoint.`} ${t`Distance: 1 minus the correlation with the nearest training image, small and grey; the middle one of the column.`}
        ${" "}${this.isToy() && t`As asked: images that show what their prompt names, by the reader of the toy world; the proposal does not use it.`}</p>
      ${this.raters()}
      ${ready ? this.end() : null}</section>`;
  }
}
