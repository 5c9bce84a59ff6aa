// The two places of runs: one run beside the Start button (panel), and all of them in their tab (runs).

import * as address from "../common/address.js";
import { make, say } from "../common/page.js";
import { ask, repeat } from "../common/studio.js";
import { figure } from "../common/words.js";
import { badge, date, RunView, setBadge, title } from "./run.js";

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
  const rows = new Map();
  const view = new RunView({
    element,
    missing: () => choose(""),
    use(name) {
      props.value = { run: name };
      trigger("submit");
    },
  });
  const filter = make("input", { type: "search", placeholder: "Find a run", "aria-label": "Find a run", class: "kr-filter" });
  const list = make("ul", { class: "kr-list" });
  const none = make("p", { class: "kr-empty", text: "No runs yet. Start one in the Train tab; it appears here and stays, also when the studio is closed." });
  const nav = make("nav", { class: "kr-nav", "aria-label": "Runs" }, filter, list);
  const hint = make("p", { class: "kr-empty kr-hint", text: "Choose a run." });
  const detail = make("div", { class: "kr-detail" }, hint, view.root);
  const columns = make("div", { class: "kr-columns-runs" }, nav, detail);
  root.append(none, columns);
  none.hidden = true;
  columns.hidden = true;
  const named = () => address.run();
  let chosen = named() || sessionStorage.getItem("kl.run") || "";
  address.onRun((name) => name !== chosen && choose(name));

  // byHand: somebody has clicked it.
  function choose(name, byHand) {
    chosen = name;
    sessionStorage.setItem("kl.run", name);
    address.shows(name, byHand);
    view.follow(name);
    hint.hidden = name !== "";
    for (const [each, row] of rows) row.button.setAttribute("aria-current", String(each === name));
    if (byHand && (matchMedia("(max-width: 800px)").matches || detail.getBoundingClientRect().top < 0)) detail.scrollIntoView({ block: "start" });
  }

  function row(run) {
    let found = rows.get(run.name);
    if (!found) {
      found = { name: make("span", { class: "kr-row-name" }), about: make("span", { class: "kr-row-about" }), badge: badge() };
      found.button = make("button", { type: "button", class: "kr-row" }, make("span", { class: "kr-row-text" }, found.name, found.about), found.badge);
      found.button.addEventListener("click", () => choose(run.name, true));
      found.root = make("li", {}, found.button);
      rows.set(run.name, found);
    }
    say(found.name, title(run.name));
    const steps = run.steps ? `${run.step.toLocaleString()}\u00a0/\u00a0${run.steps.toLocaleString()}` : "";
    const counts = [steps, run.loss === null ? "" : `loss\u00a0${figure(run.loss, 3)}`].filter(Boolean).join(" · ");
    say(found.about, [date(run.name, run.started), counts].filter(Boolean).join("\n"));
    setBadge(found.badge, run.state, run.stopping);
    found.button.setAttribute("aria-current", String(run.name === chosen));
    return found;
  }

  function sift() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [name, each] of rows) {
      const text = `${name} ${each.badge.textContent}`.toLowerCase();
      each.root.hidden = !words.every((word) => text.includes(word));
    }
  }

  filter.addEventListener("input", sift);

  function show(runs) {
    none.hidden = runs.length > 0;
    columns.hidden = runs.length === 0;
    filter.hidden = runs.length < 6;
    const names = new Set(runs.map((run) => run.name));
    for (const [name, each] of rows) {
      if (!names.has(name)) {
        each.root.remove();
        rows.delete(name);
      }
    }
    runs.forEach((run, place) => {
      const node = row(run).root;
      if (list.children[place] !== node) list.insertBefore(node, list.children[place] || null);
    });
    sift();
    if (!names.has(chosen)) {
      const missing = named();
      choose(runs.length ? runs[0].name : "");
      if (missing) view.note(`${missing} is not in the folders of this studio; this is the newest run.`);
    } else if (view.name !== chosen) choose(chosen);
    else if (!named()) address.shows(chosen);
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
