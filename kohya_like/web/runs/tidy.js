// What runs take of the disk, old states that may go, and the trash. Fetched when it is opened.

import { html, render } from "../common/html.js";
import { bracketed, ended, listed, phrased, t } from "../common/language.js";
import { make } from "../common/page.js";
import { post } from "../common/studio.js";
import { bytes, moment, plural, runWords } from "../common/words.js";
import { openDialog } from "../picking/dialog.js";

// A run that was deleted, or what a run had saved besides the chosen file.
function thrownWords({ what, ...called }) {
  const [, of = ""] = /^Other files of (.+)$/.exec(what) || [];
  return of ? t`Other files of ${runWords(of, called)}` : runWords(what, called);
}

export async function openTidy(changed) {
  const root = make("div", { class: "kl-live kr-tidy" });
  const dialog = openDialog(t`Disk and trash`, root, make("div", { class: "kl-row" }, make("button", { type: "button", class: "kl-button", text: t`Close`, onclick: () => dialog.close() })));
  dialog.classList.add("kr-tidy-dialog");
  let known = null;
  let newest = false;
  let told = t`Adding up what the runs take …`;
  let sure = ""; // what has been asked for once
  const left = new Set(); // runs whose states stay

  async function look() {
    try {
      known = await post("/kl/desk/disk", { newest });
    } catch (error) {
      told = error.message;
    }
    draw();
  }

  async function order(what, body, sentence) {
    sure = "";
    try {
      told = sentence(await post(`/kl/desk/${what}`, body));
    } catch (error) {
      told = error.message;
    }
    await look();
    changed();
  }

  // Asks: the button is pressed twice, and the second time it says what it does.
  function asked(name, words, again, act) {
    const press = () => {
      if (sure === name) return act();
      sure = name;
      draw();
    };
    return html`<button type="button" class=${sure === name ? "kr-button kr-danger" : "kr-button"} onClick=${press}>${sure === name ? again : words}</button>`;
  }

  function states() {
    const rows = known.runs.filter((run) => run.frees > 0);
    const chosen = rows.filter((run) => !left.has(run.name));
    const frees = chosen.reduce((sum, run) => sum + run.frees, 0);
    const toggle = (name) => () => {
      if (!left.delete(name)) left.add(name);
      sure = "";
      draw();
    };
    const also = (event) => {
      newest = event.currentTarget.checked;
      sure = "";
      look();
    };
    const clean = () => order("clean", { newest, runs: Object.fromEntries(chosen.map((run) => [run.name, run.steps])) }, ({ freed }) => t`${bytes(freed)} are free again.`);
    return html`<h3>${t`Old states`}</h3><p class="kr-note">${t`A run goes on from its newest whole state; older ones may go. Saved files and images stay. States do not go into the trash.`}</p>
      <label class="kr-check"><input type="checkbox" checked=${newest} onChange=${also} /> ${t`Also the newest state of runs that have finished: they cannot be trained further then`}</label>
      ${rows.length === 0 ? html`<p>${t`There is none to delete.`}</p>` : html`<ul class="kr-tidy-list" tabindex="0" aria-label=${t`Runs with old states`}>${rows.map((run) => html`<li key=${run.name}><label class="kr-check"><input type="checkbox" checked=${!left.has(run.name)} onChange=${toggle(run.name)} />
        <span>${runWords(run.name, run)}</span></label><span class="kr-note">${phrased([`${plural(run.steps.length, "state", "states")}${bracketed(run.steps.length > 4 ? t`${run.steps[0]} to ${run.steps.at(-1)}` : listed(run.steps))}`, bytes(run.frees)])}</span></li>`)}</ul>
        ${chosen.length > 0 && asked("clean", t`Clean up states: ${bytes(frees)}`, t`Really delete ${plural(chosen.reduce((sum, run) => sum + run.steps.length, 0), "state", "states")}`, clean)}`}`;
  }

  function trash() {
    const all = known.trash.reduce((sum, entry) => sum + entry.bytes, 0);
    const entries = known.trash.map((entry) => entry.name);
    return html`<h3>${t`Trash`}</h3>${entries.length === 0 ? html`<p>${t`It is empty.`}</p>` : html`<ul class="kr-tidy-list" tabindex="0" aria-label=${t`In the trash`}>${known.trash.map((entry) => html`<li key=${entry.name}><span>${thrownWords(entry)}</span>
      <span class="kr-note">${phrased([t`deleted ${moment(entry.time * 1000)}`, bytes(entry.bytes)])}</span><button type="button" class="kr-button" aria-label=${t`Put ${thrownWords(entry)} back`}
        onClick=${() => order("restore", { entry: entry.name }, () => t`${thrownWords(entry)} is back.`)}>${t`Put back`}</button></li>`)}</ul>
      ${asked("empty", t`Empty the trash: ${bytes(all)}`, t`Really delete for ever`, () => order("empty", { entries }, ({ freed }) => t`${bytes(freed)} are free again.`))}
      <p class="kr-note">${t`What is older than 30 days goes by itself.`}</p>`}`;
  }

  function draw() {
    if (!known) return render(html`<p role="status">${told}</p>`, root);
    const largest = [...known.runs].sort((one, other) => other.bytes - one.bytes).slice(0, 8);
    const all = known.runs.reduce((sum, run) => sum + run.bytes, 0);
    if (told.endsWith("…")) told = "";
    render([html`<p class="kr-status" role="status">${told}</p>`,
      html`<p>${ended(`${phrased([plural(known.runs.length, "run", "runs"), bytes(all)])}${known.free === null ? "" : t`; ${bytes(known.free)} of the disk are free`}`)}</p>`,
      html`<ul class="kr-tidy-list" tabindex="0" aria-label=${t`The largest runs`}>${largest.map((run) => html`<li key=${run.name}><span>${runWords(run.name, run)}</span><span class="kr-note">${t`${bytes(run.bytes)}, states ${bytes(run.states)}`}</span></li>`)}</ul>`,
      states(), trash()], root);
  }

  draw();
  await look();
}
