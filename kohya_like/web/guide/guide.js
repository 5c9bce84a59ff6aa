// The guided start: four questions, and the form that the answers lead to with its reasons. Talks with the routes of kohya_like/guide.py.

import { makeBrowse, makeChoice } from "../common/field.js";
import { phrased, t, translated } from "../common/language.js";
import { find, make, rich, say } from "../common/page.js";
import { ask, eachLine, headers } from "../common/studio.js";
import { plural } from "../common/words.js";
import { gather } from "../picking/images.js";
import { openDialog } from "../picking/dialog.js";
import { fill } from "../train/form.js";
import { chose } from "./reasons.js";

const OTHER = "*";

// done() is called once the form is filled.
export async function guide(done) {
  const known = await ask("/kl/guide");
  const answers = { purpose: "", model: 0, card: 0, folder: known.sets.length ? known.sets[0].path : "" };
  const status = make("p", { class: "kl-status", role: "status" });
  const wrong = make("div", { class: "kl-error", role: "alert", hidden: true });
  const purposes = makeChoice(t`What shall it learn?`, "kl-guide-what", known.purposes.map(({ name, label }) => [name, translated(label)]), (name) => {
    const purpose = known.purposes.find((each) => each.name === name);
    answers.purpose = name;
    model.only(purpose.edits ? (each) => each.edits : () => true);
    say(about, translated(purpose.about));
  });
  const about = make("p", { class: "kl-note", role: "status" });
  const model = modelQuestion(known);
  const card = make("select", { id: "kl-guide-card" }, ...known.cards.map((each, index) => make("option", { value: index, text: translated(each.label) })));
  const images = imagesQuestion(known, answers.folder);
  const go = make("button", { type: "button", class: "kl-button kl-strong", text: t`Fill in the form`, onclick: () => start() });
  const close = make("button", { type: "button", class: "kl-button", text: t`Cancel`, "aria-label": t`Close the guide`, onclick: () => dialog.close() });
  const form = make("div", { class: "kl-guide" }, make("div", {}, purposes.root, about), model.root,
    make("div", {}, make("label", { for: card.id, text: t`Which card?` }), card), images.root);
  const result = make("div", { class: "kl-guide", hidden: true });
  const dialog = openDialog(t`Guided start`, form, result, wrong, status, make("div", { class: "kl-row" }, go, close));
  dialog.addEventListener("drop", (event) => form.hidden || images.add({ files: [...event.dataTransfer.files], entries: [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean) }));
  find(purposes.root, "input").focus();

  async function start() {
    wrong.hidden = true;
    go.disabled = true;
    say(status, t`Looking at the images …`);
    /** @type {any} */
    let last = { problems: [t`The studio went away before it had an answer.`] };
    try {
      const order = { purpose: answers.purpose, ...model.read(), card: known.cards[card.value].gib, folder: images.read() };
      await eachLine(await fetch("/kl/guide/settings", { method: "POST", headers: headers(), body: JSON.stringify(order) }), (said) => {
        last = said;
        if (said.say) say(status, translated(said.say));
      });
    } catch (error) {
      last = { problems: [error.message] };
    }
    go.disabled = false;
    say(status, "");
    if (last.problems) {
      wrong.replaceChildren(...last.problems.map((text) => make("p", { text: translated(text) })));
      wrong.hidden = false;
      return;
    }
    fill(last.run, last.texts);
    chose(last.rows);
    done();
    tell(last);
  }

  // The form is filled already; what was chosen can be read here, or all of it there.
  function tell({ rows, notes }) {
    form.hidden = true;
    result.hidden = false;
    result.append(make("div", { class: "kl-explained", tabindex: "0", role: "region", "aria-label": t`What was chosen` },
      make("ul", {}, ...rows.map((row) => make("li", {}, make("strong", { text: translated(row.label) }), ` ${translated(row.value)} `, make("span", { class: "kl-help", text: translated(row.why) }))))),
      ...notes.map((text) => make("p", { class: "kl-note" }, ...rich(translated(text)))));
    go.replaceWith(make("button", { type: "button", class: "kl-button kl-strong", text: t`Start training`, onclick: () => {
      dialog.close();
      document.getElementById("kl-start").click();
    } }));
    close.textContent = t`Look at the form first`;
    close.removeAttribute("aria-label");
    find(dialog, ".kl-strong").focus();
  }
}

function modelQuestion(known) {
  const select = make("select", { id: "kl-guide-model" });
  const path = make("input", { type: "text", id: "kl-guide-path", "aria-label": t`File, folder or hub id of the model`, placeholder: t`a path on the studio's computer, or a hub id`, autocomplete: "off", spellcheck: "false" });
  const family = make("select", { id: "kl-guide-family", "aria-label": t`Family of the model` }, make("option", { value: "", text: t`Family: by the file` }), ...known.families.map(({ name, label }) => make("option", { value: name, text: label })));
  const typed = make("div", { class: "kl-control", hidden: true }, path, makeBrowse({ name: "pretrained_model_name_or_path", label: t`the model`, path: "file" }, path), family);
  const places = [...new Set(known.models.map((each) => each.where))];
  select.append(...places.map((where) => make("optgroup", { label: translated(where) }, ...known.models.flatMap((each, index) => (each.where === where ? [make("option", { value: index, text: translated(each.label) })] : [])))), make("option", { value: OTHER, text: t`Another file, folder or hub id …` }));
  // With a card in the machine a real model comes first.
  const first = known.cards[0].gib === null ? 0 : known.models.findIndex((each) => each.value !== "toy");
  select.value = first < 0 ? "0" : String(first);
  select.addEventListener("change", () => {
    typed.hidden = select.value !== OTHER;
    if (!typed.hidden) path.focus();
  });
  const chosen = () => known.models[Number(select.value)];
  const options = [...select.querySelectorAll("option")].filter((option) => option.value !== OTHER);
  // Leaves out what cannot learn it; where that was chosen, takes the first that can.
  function only(isAble) {
    for (const option of options) option.hidden = option.disabled = !isAble(known.models[Number(option.value)]);
    for (const group of select.querySelectorAll("optgroup")) group.hidden = [...group.children].every((option) => /** @type {HTMLOptionElement} */ (option).disabled);
    if (!select.selectedOptions[0].disabled) return;
    select.value = (options.find((option) => !option.disabled) || { value: OTHER }).value;
    select.dispatchEvent(new Event("change"));
  }
  return {
    only,
    root: make("div", {}, make("label", { for: select.id, text: t`Which model?` }), select, typed),
    read: () => (select.value === OTHER ? { model: path.value, family: family.value } : { model: chosen().value, family: chosen().family }),
  };
}

function imagesQuestion(known, present) {
  const path = make("input", { type: "text", id: "kl-guide-folder", list: "kl-guide-sets", autocomplete: "off", spellcheck: "false", placeholder: t`drop images here, or give a folder` });
  const sets = make("datalist", { id: "kl-guide-sets" }, ...known.sets.map((each) => make("option", { value: each.path, text: phrased([each.label, plural(each.images, "image", "images")]) })));
  const add = (given = { entries: [], files: [] }) => gather(given, path.value, (folder) => (path.value = folder));
  path.value = present;
  return {
    root: make("div", {}, make("label", { for: path.id, text: t`Where are the images?` }), make("div", { class: "kl-control" }, path, sets,
      makeBrowse({ name: "train_data_dir", label: t`the images`, path: "folder" }, path), make("button", { type: "button", class: "kl-button kl-add", text: t`Add images`, onclick: () => add() }))),
    read: () => path.value,
    add,
  };
}
