// The address of what is seen: #train, #runs, #run=NAME, #compare=NAME,NAME, #sweep=NAME, #generate ... A reload, a link, and the browser's back and forward lead there again.

import { findAll } from "./page.js";

const RUN = "#run=";
const COMPARE = "#compare=";
const SWEEP = "#sweep=";
const OF_RUNS = [RUN, COMPARE, SWEEP];
const tabs = () => findAll(document, '[role="tab"]');
const nameOf = (tab) => tab.dataset.tabId;
const selected = () => tabs().find((tab) => tab.getAttribute("aria-selected") === "true");

// Who is told that the address leads to runs.
const listeners = [];
export const onRuns = (listen) => listeners.push(listen);

function named(mark) {
  if (!location.hash.startsWith(mark)) return [];
  try {
    return location.hash.slice(mark.length).split(",").filter(Boolean).map(decodeURIComponent);
  } catch (error) {
    console.info("The address names no run:", error.message);
    return [];
  }
}

// The run that the address names, or "".
export const run = () => named(RUN)[0] || "";

// The runs that the address puts beside one another; null where it does not.
export const compared = () => (location.hash.startsWith(COMPARE) ? named(COMPARE) : null);

// The sweep that the address names, "" for any; null where it names none.
export const sweep = () => (location.hash.startsWith(SWEEP) ? named(SWEEP)[0] || "" : null);
export const makeSweep = (name) => SWEEP + encodeURIComponent(name);

const FORMER = { inference: "generate" }; // names of tabs in addresses that people have kept
const tabOf = (hash) => (OF_RUNS.some((mark) => hash.startsWith(mark)) ? "runs" : FORMER[hash.slice(1)] || hash.slice(1));

function put(hash, replace) {
  if (hash !== location.hash) history[replace ? "replaceState" : "pushState"](history.state, "", hash);
}

// The Runs tab shows a run. chosen: by a person, who may want to come back to the one before.
export function shows(name, chosen) {
  if (name && selected() && nameOf(selected()) === "runs") put(RUN + encodeURIComponent(name), !chosen || !OF_RUNS.some((mark) => location.hash.startsWith(mark)));
}

// It shows several beside one another. chosen: somebody begins with it.
export function showsCompared(names, chosen) {
  if (selected() && nameOf(selected()) === "runs") put(COMPARE + names.map(encodeURIComponent).join(","), !chosen);
}

export function show(name) {
  const tab = tabs().find((each) => nameOf(each) === name);
  if (tab && tab !== selected()) tab.click();
  return tab;
}

// It shows a sweep.
export function showsSweep(name, chosen) {
  if (selected() && nameOf(selected()) === "runs") put(makeSweep(name), !chosen);
}

function follow() {
  const tab = show(tabOf(location.hash));
  listeners.forEach((listen) => listen());
  return Boolean(tab);
}

export function open(name) {
  put(RUN + encodeURIComponent(name));
  follow();
}

// Tabs are also changed by the studio, so what counts is which one is selected. A page has its tabs some time after it is loaded.
function begin() {
  const list = document.querySelector('[role="tablist"]');
  if (!list || !selected()) return false;
  if (location.hash) follow();
  new MutationObserver(() => {
    const tab = selected();
    if (tab && nameOf(tab) !== (tabOf(location.hash) || "train")) put(`#${nameOf(tab)}`);
  }).observe(list, { attributes: true, attributeFilter: ["aria-selected"], subtree: true });
  addEventListener("popstate", () => (location.hash ? follow() : tabs()[0].click()));
  return true;
}

const waiting = new MutationObserver(() => begin() && waiting.disconnect());
if (!begin()) waiting.observe(document.documentElement, { childList: true, subtree: true });
