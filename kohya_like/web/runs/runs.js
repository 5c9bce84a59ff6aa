// The two places of runs: one run beside the Start button (panel), and all of them in their tab (runs).

import * as address from "../common/address.js";
import { html, render } from "../common/html.js";
import { make } from "../common/page.js";
import { ask, repeat } from "../common/studio.js";
import { figure } from "../common/words.js";
import { date, RunView, stateWords, title } from "./run.js";

export function panel({ element, root, props, watch }) {
  const view = new RunView({ compact: true, element, missing: () => view.follow("") });
  root.append(view.root);
  // After a reload, and when one is started elsewhere, the run that is under way is shown.
  repeat(element, async () => {
    if (view.name) return 2.5;
    try {
      const { runs } = await ask("/kl/runs");
      const active = runs.find((run) => run.state === "running") || runs.find((run) => run.state === "queued");
      if (active && !view.name) {
        view.follow(active.name);
        props.value = { run: active.name };
      }
    } catch (error) {
      console.info("No list of runs yet:", error.message);
    }
    return 2.5;
  });
  const put = () => view.follow((props.value && props.value.run) || view.name);
  watch("value", put);
  put();
}

export function runs({ element, root, props, trigger }) {
  let known = [];
  let words = []; // that a run must have to be listed
  const view = new RunView({
    element,
    missing: () => choose(""),
    use(name) {
      props.value = { run: name };
      trigger("submit");
    },
  });
  const none = make("p", { class: "kr-empty", hidden: true, text: "No runs yet. Start one in the Train tab; it appears here and stays, also when the studio is closed." });
  const nav = make("nav", { class: "kr-nav", "aria-label": "Runs" });
  const hint = make("p", { class: "kr-empty kr-hint", text: "Choose a run." });
  const detail = make("div", { class: "kr-detail" }, hint, view.root);
  const columns = make("div", { class: "kr-columns-runs", hidden: true }, nav, detail);
  root.append(none, columns);
  let chosen = address.run() || sessionStorage.getItem("kl.run") || "";
  address.onRun((name) => name !== chosen && choose(name));

  // byHand: somebody has clicked it.
  function choose(name, byHand) {
    chosen = name;
    sessionStorage.setItem("kl.run", name);
    address.shows(name, byHand);
    view.follow(name);
    hint.hidden = name !== "";
    draw();
    if (byHand && (matchMedia("(max-width: 800px)").matches || detail.getBoundingClientRect().top < 0)) detail.scrollIntoView({ block: "start" });
  }

  function row({ name, step, steps, loss, started, state, stopping }) {
    const told = stateWords(state, stopping);
    const counts = [steps ? `${step.toLocaleString()}\u00a0/\u00a0${steps.toLocaleString()}` : "", loss === null ? "" : `loss\u00a0${figure(loss, 3)}`].filter(Boolean).join(" · ");
    return html`<li key=${name} hidden=${!words.every((word) => `${name} ${told}`.toLowerCase().includes(word))}>
      <button type="button" class="kr-row" aria-current=${String(name === chosen)} onClick=${() => choose(name, true)}>
        <span class="kr-row-text"><span class="kr-row-name">${title(name)}</span><span class="kr-row-about">${[date(name, started), counts].filter(Boolean).join("\n")}</span></span>
        <span class="kr-badge" data-state=${state}>${told}</span></button></li>`;
  }

  function draw() {
    const sift = (event) => {
      words = event.currentTarget.value.toLowerCase().split(/\s+/).filter(Boolean);
      draw();
    };
    render([html`<input type="search" placeholder="Find a run" aria-label="Find a run" class="kr-filter" hidden=${known.length < 6} onInput=${sift} />`,
      html`<ul class="kr-list">${known.map(row)}</ul>`], nav);
  }

  function show(runs) {
    known = runs;
    none.hidden = runs.length > 0;
    columns.hidden = runs.length === 0;
    draw();
    if (!runs.some(({ name }) => name === chosen)) {
      const missing = address.run();
      choose(runs.length ? runs[0].name : "");
      if (missing) view.note(`${missing} is not in the folders of this studio; this is the newest run.`);
    } else if (view.name !== chosen) choose(chosen);
    else if (!address.run()) address.shows(chosen);
  }

  repeat(element, async () => {
    try {
      show((await ask("/kl/runs")).runs);
      return 2.5;
    } catch (error) {
      view.trouble(error);
      return 2;
    }
  });
}
