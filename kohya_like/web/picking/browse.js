// "Browse": folders and files on the studio's computer. One field finds and is moved through with the keyboard; the list only shows.

import { joined, t, translated } from "../common/language.js";
import { make, say } from "../common/page.js";
import { post } from "../common/studio.js";
import { plural } from "../common/words.js";
import { openDialog } from "./dialog.js";

const AT_ONCE = 300; // rows that are drawn before somebody scrolls on
const FOUND = "found";

// asked: {label, option, kind: "file" | "folder", path}. take(path) gets what was chosen.
export function browse(asked, take) {
  const places = make("select", { id: "kl-pick-places" });
  const up = make("button", { type: "button", class: "kl-button", text: t`Up`, "aria-label": t`One folder up`, onclick: () => go(here.above) });
  const path = make("code", { class: "kl-pick-path" });
  const search = make("input", {
    type: "text", id: "kl-pick-search", role: "combobox", "aria-expanded": "true", "aria-controls": "kl-pick-list", "aria-autocomplete": "list",
    "aria-label": t`Find in this folder`, placeholder: t`Find: arrow keys move, Enter opens`, autocomplete: "off", spellcheck: "false",
  });
  const list = make("ul", { id: "kl-pick-list", class: "kl-pick-list", role: "listbox", "aria-label": t`What is here` });
  const status = make("p", { class: "kl-note", role: "status" });
  const use = make("button", { type: "button", class: "kl-button kl-strong", text: t`Use this folder`, hidden: true, onclick: () => choose(here.path) });
  const close = make("button", { type: "button", class: "kl-button", text: t`Close`, "aria-label": t`Close without choosing`, onclick: () => dialog.close() });
  const dialog = openDialog(t`${asked.kind === "folder" ? t`Folder` : t`File`} for ${asked.label}`,
    make("div", { class: "kl-control" }, make("label", { for: places.id, text: t`Go to` }), places, up), path, search, list, status, make("div", { class: "kl-row" }, use, close));
  let here = { path: "", above: "", folders: [], files: [], models: [] };
  let rows = []; // {text, detail, act}, those that the search leaves
  let active = 0;
  let turns = 0;

  function choose(text) {
    dialog.close();
    take(text);
  }

  // Of several folders that are asked for, the last one counts. Until it is there, the buttons would still mean the one before.
  async function go(to, begins = false) {
    if (!to && !begins) return;
    const turn = ++turns;
    up.disabled = use.disabled = true;
    say(status, t`Reading …`);
    let answer;
    try {
      answer = await post("/kl/browse", { path: to, kind: asked.kind, option: asked.option, begins });
    } catch (error) {
      answer = { problem: t`The studio does not answer: ${error.message}` };
    }
    if (turn !== turns) return;
    up.disabled = !here.above;
    use.disabled = false;
    if (answer.problem) {
      say(status, translated(answer.problem));
      return;
    }
    here = { ...here, ...answer };
    if (begins) begin();
    if (!begins || to || !here.models.length) show(false);
    search.focus();
  }

  function begin() {
    const found = here.models.length ? [make("option", { value: FOUND, text: t`Models found here (${here.models.length})` })] : [];
    places.replaceChildren(...found, ...here.places.map((place) => make("option", { value: place.path, text: translated(place.label) })), make("option", { value: "", text: t`another folder`, hidden: true }));
    if (found.length) show(true);
  }

  // What lies in the folder, or the models that were found.
  function show(found) {
    const entries = found ? here.models.map((model) => ({ text: model.label, detail: translated(model.where), act: () => choose(model.value) })) : [
      ...here.folders.map((name) => ({ text: name, detail: t`folder`, act: () => go(inside(name)) })),
      ...here.files.map((name) => ({ text: name, detail: "", act: () => choose(inside(name)) })),
    ];
    places.value = found ? FOUND : (here.places.find((place) => place.path === here.path) || { path: "" }).path;
    path.textContent = found ? t`Models on this computer, and in the hub's cache` : here.path;
    up.disabled = found || !here.above;
    use.hidden = found || !here.takesFolder;
    search.value = "";
    search.oninput = () => sift(entries);
    sift(entries);
  }

  const inside = (name) => `${here.path}${/[\\/]$/.test(here.path) ? "" : here.path.includes("\\") ? "\\" : "/"}${name}`;

  function sift(entries) {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows = words.length ? entries.filter((entry) => words.every((word) => `${entry.text} ${entry.detail}`.toLowerCase().includes(word))) : entries;
    list.replaceChildren();
    list.scrollTop = 0;
    grow();
    point(0, false);
    const isFound = places.value === FOUND;
    const images = here.images && !isFound ? t`${plural(here.images, "image", "images")} in this folder.` : "";
    const none = rows.length ? "" : words.length ? t`Nothing here has that name.` : asked.kind === "folder" ? t`No folders in here.` : t`No folders and no files of the right kind (${here.endings.join(", ")}) in here.`;
    const cut = here.cut && !isFound ? t`Not everything is listed: the folder has more than 10,000 entries. What is not here can be typed into the field.` : "";
    say(status, joined([images, none, cut]) || plural(rows.length, "entry", "entries"));
  }

  // Further rows, as far as somebody gets.
  function grow() {
    const from = list.children.length;
    list.append(...rows.slice(from, from + AT_ONCE).map((row, index) => {
      const item = make("li", { id: `kl-pick-${from + index}`, role: "option", "aria-selected": "false" }, make("span", { text: row.text }), make("span", { class: "kl-facts", text: row.detail }));
      item.addEventListener("click", row.act);
      return item;
    }));
  }

  function point(next, scroll = true) {
    const to = Math.min(Math.max(next, 0), rows.length - 1);
    list.children[active]?.setAttribute("aria-selected", "false");
    while (list.children.length <= to && list.children.length < rows.length) grow();
    active = Math.max(to, 0);
    const item = list.children[active];
    item?.setAttribute("aria-selected", "true");
    if (item) search.setAttribute("aria-activedescendant", item.id);
    else search.removeAttribute("aria-activedescendant");
    if (item && scroll) item.scrollIntoView({ block: "nearest" });
  }

  const STEPS = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 };
  search.addEventListener("keydown", (event) => {
    if (event.key in STEPS) point(active + STEPS[event.key]);
    else if (event.key === "Enter") rows[active]?.act();
    else if (event.key === "Backspace" && !search.value) go(here.above);
    else return;
    event.preventDefault();
  });
  list.addEventListener("scroll", () => list.scrollTop + 2 * list.clientHeight > list.scrollHeight && grow());
  places.addEventListener("change", () => (places.value === FOUND ? show(true) : go(places.value)));
  go(asked.path, true);
}
