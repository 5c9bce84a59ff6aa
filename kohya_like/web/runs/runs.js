// The two places of runs: one run beside the Start button (panel), and all of them in their tab (runs).

import * as address from "../common/address.js";
import { html, render } from "../common/html.js";
import { t } from "../common/language.js";
import { make } from "../common/page.js";
import { store, stored } from "../common/stored.js";
import { ask, repeat } from "../common/studio.js";
import { calledWords, figure, grouped, tagWords } from "../common/words.js";
import { goTo } from "../train/form.js";
import { openSettings } from "../train/opening.js";
import { foresee } from "../train/starting.js";
import { date, nameOf, RunView, stateWords, stopWords, title, waitWords } from "./run.js";

const ORDERS = {
  newest: [t`Newest first`, () => 0],
  stars: [t`Starred first`, (one, other) => Number(other.starred) - Number(one.starred)],
  name: [t`By name`, (one, other) => nameOf(one).localeCompare(nameOf(other), undefined, { numeric: true })],
  state: [t`By state`, (one, other) => one.state.localeCompare(other.state)],
  loss: [t`Lowest loss first`, (one, other) => (one.loss ?? Infinity) - (other.loss ?? Infinity)],
  steps: [t`Most steps first`, (one, other) => other.step - one.step],
};

// The Runs tab, which may not be drawn yet, shows next what was started beside the form.
let showNext = (name) => sessionStorage.setItem("kl.run", name);

export function panel({ element, root, props, watch }) {
  const view = new RunView({
    compact: true, element, missing: () => view.follow(""), open: (name) => view.follow(name),
    // They are in the form.
    use: (_name, option) => goTo(option || "output_name"),
    turned: () => foresee(0),
  });
  root.append(view.root);
  // After a reload, and when one is started elsewhere, the run that is under way is shown.
  repeat(element, async () => {
    if (view.name) return 2.5;
    try {
      const { runs } = await ask("/kl/runs");
      const active = runs.find((run) => run.state === "running") || runs.find((run) => run.state === "queued");
      if (active && !view.name) {
        view.follow(active.name);
        told = active.name;
        props.value = { run: active.name };
      }
    } catch (error) {
      console.info("No list of runs yet:", error.message);
    }
    return 2.5;
  });
  let told = ""; // the run that is beside the form
  const put = () => {
    const name = (props.value && props.value.run) || "";
    view.follow(name || view.name);
    if (name && name !== told) showNext(name);
    told = name;
  };
  watch("value", put);
  put();
}

export function runs({ element, root }) {
  let known = [];
  let hasSweeps = false; // there are sweeps to look at
  let words = []; // that a run must have to be listed
  let order = stored("kl.runs.order") in ORDERS ? stored("kl.runs.order") : "newest";
  let gone = ""; // what became of the run that was deleted
  const use = (name, option = "") => openSettings({ run: name }, t`Opening the settings of ${title(name)} …`, { goTo: option });
  const view = new RunView({
    element,
    missing(why) {
      choose("");
      gone = why || "";
      look();
    },
    open: (name) => choose(name, true),
    use,
    changed: () => look(),
  });
  showNext = choose;
  const tidy = async () => (await import("./tidy.js")).openTidy(() => {
    // That a run is in the trash may be true no longer.
    view.note("");
    look();
  });
  const none = make("div", { class: "kr-empty", hidden: true }, make("p", { text: t`No runs yet. Start one in the Train tab; it appears here and stays, also when the studio is closed.` }),
    make("button", { type: "button", class: "kr-button", text: t`Disk and trash`, onclick: tidy }));
  const nav = make("nav", { class: "kr-nav", "aria-label": t`Runs` });
  const hint = make("p", { class: "kr-empty kr-hint", text: t`Choose a run.` });
  const aside = make("div", { class: "kr-beside-one-another", hidden: true });
  const detail = make("div", { class: "kr-detail" }, hint, view.root, aside);
  const columns = make("div", { class: "kr-columns-runs", hidden: true }, nav, detail);
  root.append(none, columns);
  let chosen = address.run() || sessionStorage.getItem("kl.run") || "";
  let compared = address.compared(); // names of the runs that are compared; null while one is shown
  let comparison = null; // what draws them, once it is fetched
  let swept = address.sweep(); // name of the sweep that is shown, "" for the newest; null while none is
  let sweeps = null; // what draws it, once it is fetched
  address.onRuns(() => {
    const name = address.run();
    if (address.compared()) compare(address.compared());
    else if (address.sweep() !== null) sweep(address.sweep());
    else if (name && (name !== chosen || compared || swept !== null)) choose(name);
  });

  function besides(names, name) {
    compared = names;
    swept = name;
    view.follow("");
    hint.hidden = true;
    aside.hidden = false;
    draw();
  }

  // byHand: somebody has pressed the button.
  async function sweep(name, byHand) {
    besides(null, name);
    address.showsSweep(name, byHand);
    sweeps ||= import("./sweep.js").then(({ makeSweeps }) => makeSweeps({
      open: (run) => choose(run, true),
      compare: (names) => compare(names, true),
      use,
      chosen: (shown) => {
        if (swept === null) return;
        swept = shown;
        address.showsSweep(shown);
      },
    }));
    const { root, show } = await sweeps;
    if (swept === null) return;
    aside.replaceChildren(root);
    if (name) show(name);
  }

  // byHand: somebody has pressed the button.
  async function compare(names, byHand) {
    besides(names, null);
    address.showsCompared(names, byHand);
    comparison ||= import("./compare.js").then(({ makeComparison }) => makeComparison((name) => choose(name, true)));
    const { root, show } = await comparison;
    if (compared !== names) return;
    aside.replaceChildren(root);
    show(names);
  }

  const tick = (name) => () => compare(compared.includes(name) ? compared.filter((each) => each !== name) : [...compared, name]);

  function choose(name, byHand) {
    chosen = name;
    compared = swept = null;
    aside.hidden = true;
    // While the run before it is cleared the page is short for a moment, and scrolls as it likes.
    const isFarUp = matchMedia("(max-width: 800px)").matches || detail.getBoundingClientRect().top < 0;
    if (byHand && isFarUp) detail.scrollIntoView({ block: "start" });
    sessionStorage.setItem("kl.run", name);
    address.shows(name, byHand);
    view.follow(name);
    hint.hidden = name !== "";
    draw();
  }

  function row(run) {
    const { name, notes, starred, step, steps, stop_step: stop, loss, started, state, stopping, queue } = run;
    const tags = run.tags.map(tagWords);
    const about = [name, calledWords(run), notes, starred ? t`starred ★` : "", ...run.tags, ...tags];
    const told = stateWords(state, stopping);
    const counts = [steps ? `${grouped(step)}\u00a0/\u00a0${grouped(steps)}` : "", stop ? stopWords(stop) : "", loss === null ? "" : t`loss\u00a0${figure(loss, 3)}`].filter(Boolean).join(" · ");
    const waits = queue ? [t`Number ${queue.place + 1} in the queue`, waitWords(queue)] : [];
    const inside = html`<span class="kr-row-text"><span class="kr-row-name">${nameOf(run)}${starred ? html` <span role="img" aria-label=${t`starred`}>★</span>` : ""}</span><span class="kr-row-about">${[date(name, started), ...waits, counts, tags.join(", ")].filter(Boolean).join("\n")}</span></span>
        <span class="kr-badge" data-state=${state}>${told}</span>`;
    return html`<li key=${name} hidden=${!words.every((word) => `${about.join(" ")} ${told}`.toLowerCase().includes(word))}>
      ${compared
        ? html`<label key="tick" class="kr-row"><input type="checkbox" checked=${compared.includes(name)} onChange=${tick(name)} />${inside}</label>`
        : html`<button key="row" type="button" class="kr-row" aria-current=${String(name === chosen && swept === null)} onClick=${() => choose(name, true)}>${inside}</button>`}</li>`;
  }

  function draw() {
    const sift = (event) => {
      words = event.currentTarget.value.toLowerCase().split(/\s+/).filter(Boolean);
      draw();
    };
    const sort = (event) => {
      order = event.currentTarget.value;
      store("kl.runs.order", order);
      draw();
    };
    render([html`<input type="search" placeholder=${t`Find a run`} aria-label=${t`Find a run`} class="kr-filter" hidden=${known.length < 6} onInput=${sift} />`,
      html`<select aria-label=${t`Order of the runs`} class="kr-filter" hidden=${known.length < 2} value=${order} onChange=${sort}>${Object.entries(ORDERS).map(([value, [text]]) => html`<option key=${value} value=${value}>${text}</option>`)}</select>`,
      html`<ul class="kr-list">${[...known].sort(ORDERS[order][1]).map(row)}</ul>`,
      html`<div class="kr-actions"><button type="button" class="kr-button" hidden=${known.length < 2} onClick=${() => (compared ? choose(chosen || known[0].name, true) : compare(chosen ? [chosen] : [], true))}>${compared ? t`Back to one run` : t`Compare runs`}</button>
        <button type="button" class="kr-button" hidden=${!hasSweeps} onClick=${() => sweep("", true)}>${t`Sweeps`}</button>
        <button type="button" class="kr-button" onClick=${tidy}>${t`Disk and trash`}</button>
        <button type="button" class="kr-button" onClick=${async () => (await import("./notices.js")).openNotices()}>${t`Notices`}</button></div>`], nav);
  }

  function show({ runs, sweeps: isSwept }) {
    known = runs;
    hasSweeps = isSwept;
    none.hidden = runs.length > 0;
    columns.hidden = runs.length === 0;
    draw();
    if (compared) {
      if (!comparison) compare(compared);
      else if (!address.compared()) address.showsCompared(compared);
      return;
    }
    if (swept !== null) {
      if (!sweeps) sweep(swept);
      else if (address.sweep() === null) address.showsSweep(swept);
      return;
    }
    if (!runs.some(({ name }) => name === chosen)) {
      const missing = address.run();
      choose(runs.length ? runs[0].name : "");
      if (gone && chosen) view.note(gone);
      else if (missing) view.note(t`${missing} is not in the folders of this studio; this is the newest run.`);
      gone = "";
    } else if (view.name !== chosen) choose(chosen);
    else if (!address.run()) address.shows(chosen);
  }

  const look = repeat(element, async () => {
    try {
      show(await ask("/kl/runs"));
      return 2.5;
    } catch (error) {
      view.trouble(error);
      return 2;
    }
  });
}
