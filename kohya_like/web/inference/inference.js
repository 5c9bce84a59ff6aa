// The Inference tab: pictures, an instruction and LoRA files in, pictures out. Talks with the routes of kohya_like/predict_routes.py, and
// asks nothing while the tab cannot be seen. viewer.js shows what came out.

import { blame as blameFields, makeField } from "../common/field.js";
import { bring, find, make, rich, say, sharp } from "../common/page.js";
import { makeBar } from "../common/progress.js";
import { store, stored } from "../common/stored.js";
import { ask, post, repeat, withToken } from "../common/studio.js";
import { plural } from "../common/words.js";
import { makeStrip, makeViewer } from "./viewer.js";

const DRAFT = "kl.inference";
const SESSION = "kl.session";
const MAX_PICTURES = 3;
const OTHER = "*"; // the choice of a file that is not in the list
const MAX_CHECKPOINTS = 4; // of a run, chosen for a comparison from the start

function session() {
  let name = stored(SESSION);
  if (typeof name !== "string" || !/^[0-9a-f]{32}$/.test(name)) {
    name = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    store(SESSION, name);
  }
  return name;
}

export function inference({ root }) {
  const me = `session=${session()}`;
  const address = (name, size) => withToken("/kl/predict/picture", `&${me}&size=${size}&name=${encodeURIComponent(name)}`);
  const draft = Object.assign({ texts: {}, pictures: [], loras: [], random: true }, stored(DRAFT));
  const keep = () => store(DRAFT, draft);
  const fields = new Map(); // option -> field
  let known = null; // what the studio says
  let job = null; // {id, previews, state} of the order that is shown

  // ---- what stands on the page

  const status = make("p", { class: "kl-note", role: "status" });
  const wrong = make("div", { class: "kl-error", id: "kl-inf-wrong", role: "alert", hidden: true });
  const lines = make("details", { class: "kl-part-of", hidden: true }, make("summary", {}, make("h3", { text: "Last lines of the worker" })), make("pre", { class: "kl-tool-lines", tabindex: "0" }));
  const go = make("button", { type: "button", class: "kl-button kl-strong", id: "kl-inf-go", text: "Predict", onclick: () => start(null) });
  const side = make("button", { type: "button", class: "kl-button", id: "kl-inf-compare", text: "Compare", onclick: () => {
    const variants = compared();
    if (variants) start(variants);
  } });
  const cancel = make("button", { type: "button", class: "kl-button", id: "kl-inf-cancel", text: "Cancel", hidden: true, onclick: () => stop() });
  const free = make("button", { type: "button", class: "kl-quiet", id: "kl-inf-free", text: "Free memory", onclick: () => release() });
  const form = make("section", { class: "kl-card kl-inf-form", "aria-label": "What to make" });
  const bar = makeBar();
  const phase = make("p", { class: "kl-note", id: "kl-inf-phase" });
  const preview = sharp(make("img", { class: "kl-inf-preview", alt: "Preview of what is being made", hidden: true }));
  const progress = make("div", { class: "kl-inf-progress", hidden: true }, make("div", { class: "kl-live" }, bar.root), phase, preview);
  const empty = make("p", { class: "kl-note kl-inf-empty", text: "The result appears here." });
  const view = makeViewer(address, { reuse, edit: (name) => edit(name) });
  const strip = makeStrip(address, (entry) => {
    view.show(entry);
    strip.show(known.history, entry.folder);
    empty.hidden = true;
    view.pair.scrollIntoView({ block: "nearest" });
  });
  root.append(make("div", { class: "kl-inf-columns" }, form,
    make("div", { class: "kl-tool-side" }, make("section", { class: "kl-card", "aria-label": "Result" }, wrong, lines, progress, empty, view.root), strip.root)));

  const poll = repeat(root, async () => {
    try {
      if (!known) await learn();
      if (job) {
        await follow();
        return job ? 0.35 : 0.1;
      }
      Object.assign(known, await ask(`/kl/predict/now?${me}`));
      listen();
      return 10;
    } catch (error) {
      say(status, error.message);
      return 3;
    }
  });

  async function learn() {
    known = await ask(`/kl/predict?${me}`);
    draw();
    if (known.history.length) view.show(known.history[0]);
    empty.hidden = known.history.length > 0;
    if (known.jobs.length) shown(known.jobs[0]);
    listen();
  }

  // What the studio says anew: files of runs, earlier predictions, whether anything can be freed.
  function listen() {
    loras.renew();
    strip.show(known.history, view.entry() && view.entry().folder);
    free.hidden = !known.mayFree || !known.holdsMemory;
    free.disabled = known.busy > 0;
    const others = job || !known.busy ? "" : `${plural(known.busy, "prediction of another page is", "predictions of other pages are")} under way.`;
    // The last word on an order of this page stays until there is something else to say.
    if (!status.textContent || status.textContent === status.dataset.others) say(status, (status.dataset.others = others));
  }

  // ---- the form

  const pictures = pictureSlots();
  const loras = loraRows();
  const comparing = comparison();

  function draw() {
    fields.set("images", pictures.field);
    fields.set("lora", loras.field);
    fields.set("lora_weight", loras.field);
    const grid = (specs, name = "") => make("div", { class: `kl-grid ${name}` }, ...specs.map(drawField));
    const words = known.first.filter((spec) => spec.name === "prompt" || spec.name === "negative_prompt");
    const folds = known.rest.map(({ title, fields: specs }) => make("details", { class: "kl-tool-more" }, make("summary", { text: title }), grid(specs)));
    form.replaceChildren(pictures.root, grid(words), loras.root, grid(known.first.filter((spec) => !words.includes(spec)), "kl-inf-numbers"),
      grid(known.model), ...folds, comparing.root, make("div", { class: "kl-row kl-inf-go" }, status, go, side, cancel, free));
    pictures.draw();
    loras.draw();
  }

  function drawField(spec) {
    if (spec.name === "prompt" || spec.name === "negative_prompt") spec = { ...spec, control: "area" };
    const change = () => {
      draft.texts[spec.name] = field.read();
      if (spec.name === "seed" && field.read().trim()) lock(true);
      keep();
    };
    const beside = spec.name === "seed" ? [seedLock.root] : [];
    const field = makeField(spec, `kl-inf-${spec.name}`, change, { beside });
    if (spec.name === "prompt") field.node.placeholder = "make the sky red";
    if (spec.name === "size") field.node.placeholder = "automatic";
    if (spec.name === "seed") field.node.placeholder = "drawn anew";
    if (spec.control === "area") field.node.rows = spec.name === "prompt" ? 3 : 1;
    const text = draft.texts[spec.name];
    field.set(typeof text === typeof spec.default ? text : spec.default);
    fields.set(spec.name, field);
    return field.root;
  }

  const seedLock = (() => {
    const box = make("input", { type: "checkbox", id: "kl-inf-lock" });
    box.addEventListener("change", () => lock(box.checked));
    return { box, root: make("label", { class: "kl-toggle", for: box.id }, box, make("span", { text: "Lock" })) };
  })();
  seedLock.box.checked = !draft.random;

  function lock(locked) {
    draft.random = !locked;
    seedLock.box.checked = locked;
    keep();
  }

  // A picture that is dropped or pasted anywhere on the tab becomes the next control picture.
  function pictureSlots() {
    const list = make("div", { class: "kl-inf-slots", role: "group", "aria-label": "Pictures" });
    const error = make("p", { class: "kl-error", id: "kl-inf-images-error", hidden: true });
    const file = make("input", { type: "file", id: "kl-inf-file", class: "kl-file", accept: "image/*,.jxl", multiple: true, "aria-describedby": "kl-inf-images-help kl-inf-images-error" });
    const word = make("span", { text: "" });
    const adder = make("div", { class: "kl-inf-slot kl-inf-add" }, file, make("label", { for: file.id, class: "kl-inf-addtext" }, make("strong", { "aria-hidden": "true", text: "+" }), word));
    const help = make("p", { class: "kl-help", id: "kl-inf-images-help" });
    const box = make("div", { class: "kl-field kl-wide" }, make("div", { class: "kl-head" }, make("h2", { text: "Pictures" }), make("code", { text: "images" })), list, error, help);
    const clear = () => {
      error.hidden = true;
      file.removeAttribute("aria-invalid");
    };
    file.addEventListener("change", () => {
      take([...file.files]);
      file.value = "";
    });
    const inSight = () => root.offsetParent !== null;
    const withFiles = (event) => inSight() && event.dataTransfer && [...event.dataTransfer.types].includes("Files");
    addEventListener("dragover", (event) => {
      if (!withFiles(event)) return;
      event.preventDefault();
      adder.classList.add("kl-inf-over");
    });
    addEventListener("dragleave", () => adder.classList.remove("kl-inf-over"));
    addEventListener("drop", (event) => {
      adder.classList.remove("kl-inf-over");
      if (!withFiles(event)) return;
      event.preventDefault();
      take([...event.dataTransfer.files]);
    });
    addEventListener("paste", (event) => {
      const found = inSight() && event.clipboardData ? [...event.clipboardData.files] : [];
      if (!found.length) return;
      event.preventDefault();
      take(found);
    });

    function draw() {
      help.replaceChildren(...rich(known.help.images));
      list.replaceChildren(...draft.pictures.map((picture, index) => {
        const image = sharp(make("img", { src: address(picture.name, "thumb"), alt: `Picture ${index + 1}` }));
        image.addEventListener("error", () => {
          // Uploads are kept for a day.
          draft.pictures = draft.pictures.filter((each) => each !== picture);
          keep();
          draw();
        });
        const remove = make("button", { type: "button", class: "kl-inf-remove", "aria-label": `Remove picture ${index + 1}`, text: "×", onclick: () => {
          draft.pictures.splice(index, 1);
          clear();
          keep();
          draw();
          file.focus();
        } });
        return make("div", { class: "kl-inf-slot" }, image, make("span", { class: "kl-corner kl-corner-left", text: draft.pictures.length > 1 ? String(index + 1) : "" }), remove);
      }));
      word.textContent = draft.pictures.length ? "Add a picture" : "Choose, drop or paste a picture";
      if (draft.pictures.length < MAX_PICTURES) list.append(adder);
    }

    async function take(files) {
      clear();
      for (const each of files) {
        if (draft.pictures.length >= MAX_PICTURES) break;
        say(status, `Reading ${each.name || "the picture"} …`);
        try {
          if (each.size > known.maxBytes) throw new Error(`${each.name} is larger than ${known.maxBytes >> 20} MiB, which is the most.`);
          const answer = await ask("/kl/predict/upload", { method: "POST", body: each });
          if (answer.problems) throw new Error(answer.problems.map(({ message }) => message.replace("images: the file", each.name || "The picture")).join(" "));
          draft.pictures.push(answer.picture);
          keep();
          draw();
          say(status, "");
        } catch (failure) {
          say(status, "");
          error.textContent = failure.message;
          error.hidden = false;
        }
      }
    }

    return { root: box, draw, take, field: { node: file, error, clear } };
  }

  // Files of runs, newest first, or a typed path; each with its strength.
  function loraRows() {
    const list = make("div", { class: "kl-inf-loras" });
    const error = make("p", { class: "kl-error", id: "kl-inf-lora-error", hidden: true });
    const add = make("button", { type: "button", class: "kl-button", id: "kl-inf-add-lora", text: "Add a LoRA", onclick: () => {
      const newest = known.loras[0];
      draft.loras.push({ name: newest ? newest.name : "", weight: "1", typed: !newest });
      keep();
      draw();
      find(list, ".kl-inf-lora:last-child :is(select, input)").focus();
    } });
    const help = make("p", { class: "kl-help", id: "kl-inf-lora-help" });
    const box = make("div", { class: "kl-field kl-wide" }, make("div", { class: "kl-head" }, make("h2", { text: "LoRA files" }), make("code", { text: "lora" })), list, make("div", { class: "kl-row" }, add), error, help);
    const clear = () => {
      error.hidden = true;
      add.removeAttribute("aria-invalid");
    };
    let offered = "";

    function choices(select, row) {
      const runs = [...new Set(known.loras.map((each) => each.run))];
      const there = known.loras.some((each) => each.name === row.name);
      select.replaceChildren(
        make("option", { value: "", text: known.loras.length ? "Choose a file …" : "No run of this family has saved a file yet" }),
        ...runs.map((run) => make("optgroup", { label: run }, ...known.loras.filter((each) => each.run === run).map((each) => make("option", { value: each.name, text: each.label })))),
        ...(known.mayType ? [make("option", { value: OTHER, text: "Another file …" })] : []));
      if (row.name && !there) row.typed = known.mayType;
      select.value = row.typed ? OTHER : there ? row.name : "";
    }

    function drawRow(row, index) {
      const select = make("select", { "aria-label": `LoRA file ${index + 1}` });
      const path = make("input", { type: "text", "aria-label": `Path of LoRA file ${index + 1}`, placeholder: "a path on the studio's computer", autocomplete: "off", spellcheck: "false" });
      const weight = make("input", { type: "number", step: "0.05", "aria-label": `Strength of LoRA file ${index + 1}`, title: "Strength" });
      const change = () => {
        row.typed = select.value === OTHER;
        row.name = row.typed ? path.value : select.value;
        row.weight = weight.value;
        path.hidden = !row.typed;
        clear();
        keep();
        comparing.renew();
      };
      path.value = row.name;
      weight.value = row.weight;
      choices(select, row);
      path.hidden = !row.typed;
      select.addEventListener("change", change);
      path.addEventListener("input", change);
      weight.addEventListener("input", change);
      const remove = make("button", { type: "button", class: "kl-button", "aria-label": `Remove LoRA file ${index + 1}`, text: "×", onclick: () => {
        draft.loras.splice(index, 1);
        keep();
        draw();
        add.focus();
      } });
      return make("div", { class: "kl-inf-lora" }, select, path, weight, remove);
    }

    function draw() {
      help.replaceChildren(...rich(known.help.lora));
      list.replaceChildren(...draft.loras.map(drawRow));
      add.hidden = draft.loras.length >= known.maxLoras;
      offered = JSON.stringify(known.loras);
      comparing.renew();
    }

    // New files appear, unless somebody is choosing.
    function renew() {
      if (offered !== JSON.stringify(known.loras) && !list.contains(document.activeElement)) draw();
    }

    return { root: box, draw, renew, field: { node: add, error, clear } };
  }

  // Which pictures stand side by side: the base, the files above, the checkpoints of a run.
  function comparison() {
    const base = make("input", { type: "checkbox", id: "kl-inf-with-base", checked: true });
    const chosen = make("input", { type: "checkbox", id: "kl-inf-with-chosen", checked: true });
    const pick = make("select", { id: "kl-inf-run" });
    const list = make("div", { class: "kl-inf-checks" });
    const tick = (box, text) => make("label", { class: "kl-toggle", for: box.id }, box, make("span", { text }));
    const box = make("details", { class: "kl-tool-more" }, make("summary", { text: "What is compared" }),
      make("div", { class: "kl-inf-checks" }, tick(base, "The base model alone"), tick(chosen, "With the LoRA files above")),
      make("div", { class: "kl-inf-run" }, make("label", { for: pick.id, text: "Checkpoints of" }), pick), list);
    let boxes = [];

    const runs = () => [...new Set(known.loras.map((each) => each.run))];
    const filesOf = (run) => known.loras.filter((each) => each.run === run);
    const current = () => draft.loras.filter((row) => String(row.name).trim());
    const runOf = (name) => (known.loras.find((each) => each.name === name) || {}).run;

    function renew() {
      const wanted = current().map((row) => runOf(row.name)).find(Boolean) || runs()[0] || "";
      const run = pick.dataset.touched && runs().includes(pick.value) ? pick.value : wanted;
      pick.replaceChildren(make("option", { value: "", text: "no run" }), ...runs().map((each) => make("option", { value: each, text: each })));
      pick.value = run;
      check();
    }

    function check() {
      const used = new Set(current().map((row) => row.name));
      const others = filesOf(pick.value).filter((each) => !used.has(each.name));
      // Spread over the run when there are more than fit.
      const stride = Math.max(1, Math.ceil(others.length / MAX_CHECKPOINTS));
      boxes = others.map((file, index) => [file, make("input", { type: "checkbox", id: `kl-inf-check-${index}`, checked: index % stride === 0 })]);
      list.replaceChildren(...boxes.map(([file, each]) => tick(each, file.label)));
    }
    pick.addEventListener("change", () => {
      pick.dataset.touched = "1";
      check();
    });

    return {
      root: box, renew,
      variants() {
        const rows = current();
        const found = [];
        if (base.checked) found.push({ label: "base", loras: [] });
        for (const [file, each] of [...boxes].reverse()) {
          if (!each.checked) continue;
          // A checkpoint takes the place of the chosen file of its run; the others stay.
          const place = rows.findIndex((row) => runOf(row.name) === file.run);
          const row = { name: file.name, weight: place >= 0 ? rows[place].weight : "1" };
          found.push({ label: file.label, loras: place >= 0 ? rows.map((old, index) => (index === place ? row : old)) : [...rows, row] });
        }
        if (chosen.checked && rows.length) {
          const label = rows.map((row) => (known.loras.find((each) => each.name === row.name) || { label: row.name.split(/[\\/]/).pop().replace(/\.safetensors$/, "") }).label).join(" + ");
          found.push({ label, loras: rows });
        }
        return found.map(({ label, loras: files }) => ({ label, loras: files.map(({ name, weight }) => ({ name, weight })) }));
      },
    };
  }

  function compared() {
    const variants = comparing.variants();
    if (variants.length > 1) return variants;
    tell("Nothing to compare: choose a LoRA file above, or checkpoints of a run under What is compared.");
    return null;
  }

  function tell(text, more = []) {
    blameFields(fields, wrong, [text, ...more].filter(Boolean).map((message) => ({ option: "", message })));
  }

  // ---- an order

  async function start(variants) {
    if (job) return;
    const texts = Object.fromEntries([...fields].filter(([, field]) => field.read).map(([name, field]) => [name, field.read()]));
    if (draft.random) texts.seed = "";
    const order = { texts, pictures: draft.pictures.map(({ name }) => name), loras: draft.loras.map(({ name, weight }) => ({ name, weight })), variants: variants || [] };
    go.disabled = side.disabled = true;
    lines.hidden = true;
    try {
      const answer = await post(`/kl/predict/start?${me}`, order);
      blameFields(fields, wrong, answer.problems || []);
      if (answer.job) {
        shown(answer.job);
        poll();
      }
    } catch (error) {
      tell(error.message);
    } finally {
      go.disabled = side.disabled = job !== null;
    }
  }

  function shown(id) {
    job = { id, previews: 0, stopping: false };
    go.disabled = side.disabled = true;
    cancel.hidden = false;
    cancel.disabled = false;
    progress.hidden = false;
    empty.hidden = true;
    preview.hidden = true;
    view.root.hidden = true;
    say(phase, "");
    free.hidden = true;
    bring(progress);
  }

  async function follow() {
    const answer = await ask(`/kl/predict/job/${job.id}?${me}&previews=${job.previews}`).catch((error) => ({ state: "failed", text: error.message, lines: [], problems: [], warnings: [] }));
    job.previews = answer.previews;
    if (answer.preview) {
      preview.src = answer.preview;
      preview.hidden = false;
    }
    drawProgress(answer);
    if (answer.state === "queued" || answer.state === "running") return;
    await over(answer);
  }

  function drawProgress(answer) {
    const all = Math.max(1, answer.steps * Math.max(1, answer.pictures));
    const share = answer.steps ? Math.min(1, (answer.done * answer.steps + answer.step) / all) : null;
    bar.show(share, answer.state === "running");
    const waits = answer.state === "queued" ? `Waiting: number ${answer.ahead} in the queue` : "";
    const counts = answer.steps && answer.step ? `step ${answer.step} of ${answer.steps}${answer.pictures > 1 ? `, picture ${Math.min(answer.done + 1, answer.pictures)} of ${answer.pictures}` : ""}` : "";
    say(phase, waits || [answer.cancelling ? "Cancelling" : answer.phase || "Starting", counts].filter(Boolean).join(" · "));
    say(status, waits || (answer.cancelling ? "Cancelling" : answer.phase || ""));
  }

  async function over(answer) {
    job = null;
    go.disabled = side.disabled = false;
    cancel.hidden = true;
    progress.hidden = true;
    Object.assign(known, await ask(`/kl/predict/now?${me}`));
    const made = known.history.find((entry) => entry.folder === answer.folder);
    if (made) {
      view.show(made);
      bring(view.root);
    } else if (view.entry()) view.show(view.entry());
    else empty.hidden = false;
    if (made && draft.random && made.results[0].seed !== null && fields.has("seed")) {
      fields.get("seed").set(String(made.results[0].seed));
      draft.texts.seed = String(made.results[0].seed);
      keep();
    }
    listen();
    say(status, { done: "Done.", cancelled: "Cancelled.", failed: "Failed." }[answer.state]);
    if (answer.state === "failed") blame(answer);
    else blameFields(fields, wrong, []);
  }

  function blame(answer) {
    if (answer.problems.length) blameFields(fields, wrong, answer.problems);
    else tell(answer.text, [answer.remedy]);
    lines.hidden = !answer.lines.length;
    lines.querySelector("pre").textContent = answer.lines.join("\n");
  }

  async function stop() {
    cancel.disabled = true;
    try {
      await ask(`/kl/predict/job/${job.id}/cancel?${me}`, { method: "POST" });
    } catch (error) {
      tell(error.message);
    }
    poll();
  }

  async function release() {
    free.disabled = true;
    try {
      await ask("/kl/predict/free", { method: "POST" });
      free.hidden = true;
      say(status, "The model is out of memory.");
    } catch (error) {
      tell(error.message);
    }
  }

  // ---- from what was made before

  function reuse(entry) {
    for (const [name, text] of Object.entries(entry.texts)) {
      const field = fields.get(name);
      if (!field || !field.read || typeof field.read() !== typeof text) continue;
      field.set(text);
      draft.texts[name] = text;
    }
    const seed = entry.results[0].seed;
    if (seed !== null && fields.has("seed")) {
      fields.get("seed").set(String(seed));
      draft.texts.seed = String(seed);
      lock(true);
    }
    draft.pictures = entry.controls.map((file) => ({ name: `${entry.folder}/${file}` }));
    draft.loras = (entry.loras || []).map((row) => ({ ...row }));
    keep();
    pictures.draw();
    loras.draw();
    blameFields(fields, wrong, []);
    say(status, "The settings of this picture are in the form; its seed is locked.");
  }

  function edit(name) {
    draft.pictures = [{ name }];
    keep();
    pictures.draw();
    const prompt = fields.get("prompt").node;
    prompt.focus();
    prompt.select();
  }
}
