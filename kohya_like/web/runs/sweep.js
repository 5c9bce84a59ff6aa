// Sweeps: which values were tried, how each run does, and which goes on. Fetched when somebody looks at one.

import { html, render } from "../common/html.js";
import { joined, t, translated } from "../common/language.js";
import { make, say } from "../common/page.js";
import { post, repeat } from "../common/studio.js";
import { figure, grouped, plural, triedWords } from "../common/words.js";
import { stateWords, title } from "./run.js";

// open(name) shows one run instead, compare(names) several beside one another, use(name) fills the form with the settings of one, chosen(name)
// hears which sweep is shown.
export function makeSweeps({ open, compare, use, chosen }) {
  let names = [];
  let name = "";
  let known = null;
  let sure = false; // "Delete the others" has been pressed once
  const heading = make("h2", { class: "kr-title", "aria-live": "polite", text: t`Sweeps` });
  const status = make("p", { class: "kr-status", role: "status" });
  const box = make("div", { class: "kr-compare" });
  const root = make("article", { class: "kr-run", "aria-label": t`Sweep` }, heading, status, box);

  async function order(what, words) {
    sure = false;
    try {
      say(status, words(await post(`/kl/sweeps/${what}`, { name })));
    } catch (error) {
      say(status, error.message);
    }
    turn();
  }

  function told({ state, step }) {
    if (!state) return t`Not started yet`;
    return `${state === "waiting" ? t`Waits for the others` : stateWords(state)}${step ? t`, step ${grouped(step)}` : ""}`;
  }

  function table() {
    const head = known.steps.map((step) => html`<th scope="col" key=${step}>${t`Step`} ${grouped(step)}</th>`);
    const best = known.steps.map((_, rung) => Math.min(...known.runs.map(({ losses }) => losses[rung] ?? Infinity)));
    const name = (each) => (each.run ? html`<button type="button" class="kl-link" onClick=${() => open(each.run)}>${triedWords(each)}</button>` : triedWords(each));
    const row = (each) => html`<tr key=${triedWords(each)} aria-label=${each.won ? t`The best` : null}>
      <th scope="row">${name(each)}${each.won ? html` <span role="img" aria-label=${t`the best`}>★</span>` : ""}</th>
      ${known.steps.map((step, rung) => html`<td key=${step}>${each.losses[rung] === undefined ? "–" : each.losses[rung] === best[rung] ? html`<strong>${figure(each.losses[rung])}</strong>` : figure(each.losses[rung])}</td>`)}
      <td>${translated(each.out) || told(each)}</td></tr>`;
    return html`<div class="kr-compare-scroll" tabindex="0" role="region" aria-label=${t`Table of the sweep`}><table class="kl-table">
      <thead><tr><th scope="col">${t`Settings`}</th>${head}<th scope="col">${t`State`}</th></tr></thead><tbody>${known.runs.map(row)}</tbody></table></div>`;
  }

  function buttons() {
    const runs = known.runs.filter(({ run }) => run);
    const others = runs.filter(({ won }) => !won);
    const best = runs.find(({ won }) => won);
    const drop = () => {
      if (sure) return order("discard", ({ runs: gone }) => t`Moved to the trash: ${plural(gone.length, "run", "runs")}. Disk and trash puts them back.`);
      sure = true;
      draw();
    };
    return html`<div class="kr-actions">
      <button type="button" class="kr-button kr-primary" hidden=${!best} onClick=${() => use(best.run)}>${t`Use the winner's settings`}</button>
      <button type="button" class="kr-button" hidden=${runs.length < 2} onClick=${() => compare(runs.map(({ run }) => run))}>${t`Compare these runs`}</button>
      <button type="button" class="kr-button" hidden=${known.is_ended} onClick=${() => order("end", () => t`Nothing more is started; what is at work saves and ends.`)}>${t`End the sweep`}</button>
      <button type="button" class=${sure ? "kr-button kr-danger" : "kr-button"} hidden=${!best || !others.length} onClick=${drop}>${sure ? t`Move ${plural(others.length, "run", "runs")} to the trash` : t`Delete the others`}</button></div>`;
  }

  function draw() {
    say(heading, name ? t`Sweep ${title(name)}` : t`Sweeps`);
    const pick = (event) => show(event.currentTarget.value);
    const picker = names.length > 1 && html`<label class="kr-name" for="kl-sweep-choice">${t`Sweep`}</label>
      <select id="kl-sweep-choice" class="kr-filter" value=${name} onChange=${pick}>${names.map((each) => html`<option key=${each} value=${each}>${title(each)}</option>`)}</select>`;
    const won = known && known.runs.find((each) => each.won);
    const none = html`<p class="kr-empty">${t`No sweeps yet. Sweep in the Train tab tries several values of a setting.`}</p>`;
    render(known ? [picker, known.verdict && html`<p class="kr-caption">${joined([won && !won.own && t`${triedWords(won)} wins.`, translated(known.verdict)])}</p>`, known.notes.map((note) => html`<p class="kr-note">${translated(note)}</p>`),
      html`<p class="kr-note">${t`Mean loss on the held-out images, the same for all; the lowest of each step is bold.`}</p>`, table(), buttons()] : names.length ? null : none, box);
  }

  const turn = repeat(root, async () => {
    try {
      names = (await post("/kl/sweeps/list", {})).sweeps;
      if (!names.includes(name)) show(names[0] || "");
      const asked = name;
      const answer = name ? await post("/kl/sweeps/show", { name }) : null;
      if (asked !== name) return 0;
      known = answer;
      draw();
      return known && !known.is_ended ? 2.5 : 10;
    } catch (error) {
      say(status, error.message);
      return 5;
    }
  });

  function show(given) {
    if (given === name) return;
    name = given;
    known = null;
    sure = false;
    say(status, "");
    chosen(name);
    draw();
    turn();
  }

  return { root, show };
}
