// The images of one prediction: before and after under one slider, results side by side, and the strip of earlier predictions.

import { t } from "../common/language.js";
import { make, sharp } from "../common/page.js";
import { clock, duration } from "../common/words.js";

// Before and after, one over the other. The slider lies over the whole image: mouse, finger and arrow keys move it.
function pairView() {
  const before = make("img", { class: "kl-before", alt: "" });
  const after = make("img", { class: "kl-after", alt: "" });
  const left = make("span", { class: "kl-corner kl-corner-left" });
  const right = make("span", { class: "kl-corner kl-corner-right" });
  const cut = make("input", { type: "range", id: "kl-inf-cut", class: "kl-cut", min: 0, max: 100, step: 1, value: 50, "aria-label": t`Before and after` });
  const root = make("div", { class: "kl-pair" }, before, after, left, right, cut);
  const wipe = () => {
    root.style.setProperty("--kl-cut", `${cut.value}%`);
    cut.setAttribute("aria-valuetext", t`${cut.value} % before, ${100 - Number(cut.value)} % after`);
  };
  cut.addEventListener("input", wipe);
  after.addEventListener("load", () => {
    root.style.setProperty("--kl-ratio", String(after.naturalWidth / after.naturalHeight));
  });
  sharp(before);
  sharp(after, root);
  wipe();
  return {
    root, cut,
    // Each is {src, name, alt}; the first may be null.
    show(old, fresh) {
      root.classList.toggle("kl-alone", !old);
      before.hidden = cut.hidden = left.hidden = !old;
      if (old && before.getAttribute("src") !== old.src) before.setAttribute("src", old.src);
      if (after.getAttribute("src") !== fresh.src) after.setAttribute("src", fresh.src);
      before.alt = old ? old.alt : "";
      after.alt = fresh.alt;
      left.textContent = old ? old.name : "";
      right.textContent = old ? fresh.name : "";
    },
  };
}

// One prediction. address(name, size) gives the address of an image; act is {reuse(entry), edit(name), edits(), compare(entry, seed), compares()}.
export function makeViewer(address, act) {
  const pair = pairView();
  const left = make("select", { id: "kl-inf-left" });
  const right = make("select", { id: "kl-inf-right" });
  const choices = make("div", { class: "kl-row kl-inf-choices" },
    make("label", { for: left.id }, make("span", { text: t`Before` }), left), make("label", { for: right.id }, make("span", { text: t`After` }), right));
  const grid = make("div", { class: "kl-inf-grid", role: "group", "aria-label": t`Results side by side` });
  const facts = make("p", { class: "kl-note" });
  const prompt = make("p", { class: "kl-inf-prompt" });
  const notes = make("ul", { class: "kl-plain kl-note" });
  const download = make("a", { class: "kl-button", id: "kl-inf-download", text: t`Download` });
  const downloadGrid = make("a", { class: "kl-button", text: t`Download the grid` });
  const reuse = make("button", { type: "button", class: "kl-button", id: "kl-inf-reuse", text: t`Use these settings`, onclick: () => act.reuse(entry) });
  const edit = make("button", { type: "button", class: "kl-button", text: t`Edit this further`, onclick: () => act.edit(chosen().name) });
  const seedOf = () => entry.results[Number(right.value) - olds()]?.seed ?? null;
  const compare = make("button", { type: "button", class: "kl-button", id: "kl-inf-send", text: t`Send to Compare`, onclick: () => act.compare(entry, seedOf()) });
  const root = make("div", { class: "kl-inf-view", hidden: true }, pair.root, choices, grid, prompt, facts, notes, make("div", { class: "kl-row" }, download, downloadGrid, reuse, compare, edit));
  let entry = null;
  let images = []; // {name, title, alt}: the control images, then the results

  const chosen = () => images[Number(right.value)];
  const olds = () => entry.controls.length;

  function draw() {
    const fresh = chosen();
    const old = left.value === "" ? null : images[Number(left.value)];
    const shown = (image) => image && { src: address(image.name, "full"), name: image.title, alt: image.alt };
    pair.show(old === fresh ? null : shown(old), shown(fresh));
    download.href = address(fresh.name, "file");
    download.setAttribute("aria-label", t`Download ${fresh.title || t`the image`}`);
    const result = entry.results[Number(right.value) - olds()];
    facts.textContent = [result && result.width ? `${result.width} × ${result.height} px` : "", result && result.seed !== null ? t`seed ${result.seed}` : "",
      entry.seconds ? duration(entry.seconds) : "", clock(1000 * entry.time)].filter(Boolean).join(" · ");
    edit.hidden = !act.edits();
    compare.hidden = !act.compares() || !entry.texts.prompt || seedOf() === null;
    for (const button of grid.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.place === right.value));
  }
  left.addEventListener("change", draw);
  right.addEventListener("change", draw);

  function option(image, place) {
    return make("option", { value: place, text: image.title });
  }

  return {
    root, cut: pair.cut, pair: pair.root,
    entry: () => entry,
    // Another model may be able to edit images, or not.
    renew: () => entry && draw(),
    hide() {
      root.hidden = true;
      entry = null;
    },
    show(next) {
      entry = next;
      const many = next.results.length > 1;
      const words = next.texts.prompt || t`no instruction`;
      images = [
        ...next.controls.map((file, index) => ({ name: `${next.folder}/${file}`, title: next.controls.length > 1 ? t`Image ${index + 1}` : t`Before`, alt: t`Image ${index + 1} as given` })),
        ...next.results.map((result, index) => {
          const title = [result.label, many && (!result.label || next.results.filter((each) => each.label === result.label).length > 1) ? t`seed ${result.seed}` : ""].filter(Boolean).join(", ") || t`After`;
          return { name: `${next.folder}/${result.file}`, title, alt: t`Result ${index + 1}${result.label ? `, ${result.label}` : ""}: ${words}` };
        }),
      ];
      left.replaceChildren(...images.map(option), make("option", { value: "", text: t`nothing` }));
      right.replaceChildren(...images.map(option).slice(olds()));
      right.value = String(images.length - 1);
      left.value = olds() ? String(olds() - 1) : many ? "0" : "";
      choices.hidden = images.length < 3;
      grid.hidden = !many;
      grid.replaceChildren(...(many ? images.slice(olds()) : []).map((image, index) => {
        const button = make("button", { type: "button", class: "kl-inf-cell", "data-place": String(index + olds()), "aria-pressed": "false" },
          sharp(make("img", { src: address(image.name, "full"), alt: "", loading: "lazy" })), make("span", { text: image.title }));
        button.addEventListener("click", () => {
          right.value = button.dataset.place;
          draw();
          pair.root.scrollIntoView({ block: "nearest" });
        });
        return button;
      }));
      prompt.textContent = words;
      notes.replaceChildren(...(next.warnings || []).map((text) => make("li", { text })));
      downloadGrid.hidden = !next.grid;
      if (next.grid) downloadGrid.href = address(`${next.folder}/${next.grid}`, "file");
      root.hidden = false;
      draw();
    },
  };
}

// Earlier predictions, newest first. pick(entry) shows one.
export function makeStrip(address, pick) {
  const list = make("div", { class: "kl-inf-strip", role: "group", "aria-label": t`Earlier predictions` });
  const root = make("section", { class: "kl-card", "aria-labelledby": "kl-inf-before", hidden: true }, make("h2", { id: "kl-inf-before", text: t`Made before` }), list);
  return {
    root,
    show(entries, current) {
      root.hidden = entries.length === 0;
      const wanted = entries.map((entry) => entry.folder).join();
      if (list.dataset.shown !== wanted) {
        list.dataset.shown = wanted;
        list.replaceChildren(...entries.map((entry) => {
          const count = entry.results.length;
          const name = `${entry.texts.prompt || t`No instruction`}${count > 1 ? t`, ${count} images` : ""}, ${clock(1000 * entry.time)}`;
          const image = sharp(make("img", { src: address(`${entry.folder}/${entry.results[count - 1].file}`, "thumb"), alt: "", loading: "lazy" }));
          return make("button", { type: "button", class: "kl-inf-thumb", "aria-label": name, title: name, "data-folder": entry.folder, onclick: () => pick(entry) },
            image, count > 1 ? make("span", { class: "kl-inf-count", text: String(count), "aria-hidden": "true" }) : null);
        }));
      }
      for (const button of list.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.folder === current));
    },
  };
}
