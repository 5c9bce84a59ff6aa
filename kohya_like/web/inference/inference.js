// The Generate tab: what to draw with, a prompt and LoRA files in, images out. Talks with the routes of kohya_like/predict_routes.py, and
// asks nothing while the tab cannot be seen. viewer.js shows what came out.

import { blame as blameFields, makeBrowse, makeChoice, makeField } from "../common/field.js";
import { listed, t, translated } from "../common/language.js";
import { bring, find, make, rich, say, sharp } from "../common/page.js";
import { makeMemory } from "../common/memory.js";
import { makeBar } from "../common/progress.js";
import { store, stored } from "../common/stored.js";
import { ask, post, repeat, withToken } from "../common/studio.js";
import { duration, runWords } from "../common/words.js";
import { makeAxes } from "./axes.js";
import { Compare } from "./compare.js";
import { makeDropping } from "./dropping.js";
import { makeSlots } from "./slots.js";
import { makeStrip, makeViewer } from "./viewer.js";
import { makeWhy } from "./why.js";

const DRAFT = "kl.inference";
const SESSION = "kl.session";
const BASE = "pretrained_model_name_or_path";
const OTHER = "*"; // the choice of a file that is not in the list

// What somebody opens shows its beginning, above the row of buttons that stays at the foot of the form.
function fold(title, ...inside) {
  const summary = make("summary", { text: title });
  const opened = (event) => event.target.open && document.activeElement === summary && bring(inside[0].firstElementChild);
  return make("details", { class: "kl-tool-more", ontoggle: opened }, summary, ...inside);
}

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
  const address = (name, size) => withToken("/kl/predict/image", `&${me}&size=${size}&name=${encodeURIComponent(name)}`);
  const left = stored(DRAFT) || {};
  const draft = { with: "", family: "", texts: {}, images: left.pictures || [], loras: [], axes: {}, random: true, ...left }; // 0.1 called them pictures
  const keep = () => store(DRAFT, draft);
  const fields = new Map(); // option -> field
  let known = null; // what the studio says
  let reading = false; // what it is that was chosen to draw with
  let job = null; // {id, about, previews, stopping} of the order that is shown

  // ---- what stands on the page

  const status = make("p", { class: "kl-note", role: "status" });
  const wrong = make("div", { class: "kl-error", id: "kl-inf-wrong", role: "alert", hidden: true });
  const lines = make("details", { class: "kl-part-of", hidden: true }, make("summary", {}, make("h3", { text: t`Last lines of the worker` })), make("pre", { class: "kl-tool-lines", tabindex: "0" }));
  const go = make("button", { type: "button", class: "kl-button kl-strong", id: "kl-inf-go", text: t`Generate`, onclick: () => start(null) });
  const side = make("button", { type: "button", class: "kl-button", id: "kl-inf-compare", text: t`Compare`, onclick: () => compare() });
  const cancel = make("button", { type: "button", class: "kl-button", id: "kl-inf-cancel", text: t`Cancel`, hidden: true, onclick: () => stop() });
  const beside = make("p", { class: "kl-note", id: "kl-inf-beside", hidden: true });
  const free = make("button", { type: "button", class: "kl-quiet", id: "kl-inf-free", text: t`Free memory`, onclick: () => release() });
  const form = make("section", { class: "kl-card kl-inf-form", "aria-label": t`What to draw` });
  const bar = makeBar();
  const phase = make("p", { class: "kl-note", id: "kl-inf-phase" });
  const preview = sharp(make("img", { class: "kl-inf-preview", alt: t`Preview of what is being made`, hidden: true }));
  const progress = make("div", { class: "kl-inf-progress", hidden: true }, make("div", { class: "kl-live" }, bar.root), phase, preview);
  const empty = make("p", { class: "kl-note kl-inf-empty", text: t`The result appears here.` });
  const view = makeViewer(address, { reuse, edit: (name) => edit(name), edits: () => known.choice.edits, compare: send, compares: () => known.choice.draws });
  const strip = makeStrip(address, (entry) => {
    view.show(entry);
    strip.show(known.history, entry.folder);
    empty.hidden = true;
    view.pair.scrollIntoView({ block: "nearest" });
  });
  const why = makeWhy(() => ({ texts: ordered().texts, loras: draft.loras }));
  const grids = new Compare();
  const views = makeChoice("", "kl-inf-view", [["draw", t`Draw`], ["compare", t`Grids`]], (view) => {
    columns.hidden = view !== "draw";
    grids.root.hidden = view !== "compare";
    if (view === "compare") grids.open();
  });
  views.root.classList.add("kl-inf-views");
  views.root.setAttribute("aria-label", t`What this tab shows`);
  views.root.hidden = true;
  views.radios.get("draw").checked = true;
  const columns = make("div", { class: "kl-inf-columns" }, form,
    make("div", { class: "kl-tool-side" }, make("section", { class: "kl-card", "aria-label": t`Result` }, wrong, lines, progress, empty, view.root), strip.root, why));
  root.append(views.root, columns, grids.root);

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

  // What somebody chose before, or the newest that there is; a run that is to be tried comes first.
  async function learn() {
    const asked = (given, family) => ask(`/kl/predict?${me}&with=${encodeURIComponent(given)}&family=${encodeURIComponent(family)}`);
    let answer = await asked(draft.with, draft.family);
    if (answer.problems) answer = await asked("", "");
    known = answer;
    const fresh = !draft.with || draft.with !== known.choice.with;
    if (fresh) taken();
    draw();
    tryRun();
    if (known.history.length) view.show(known.history[0]);
    empty.hidden = known.history.length > 0;
    if (known.jobs.length) shown(known.jobs[0]);
    listen();
  }

  // The form becomes that of what is drawn with: its base, settings, LoRA files and words are filled in. The last choice counts.
  let choices = 0;
  async function choose(given, family) {
    const turn = ++choices;
    say(status, t`Reading what it is …`);
    hold(true);
    const answer = await ask(`/kl/predict?${me}&with=${encodeURIComponent(given)}&family=${encodeURIComponent(family)}`)
      .catch((error) => ({ problems: [{ message: error.message }] }));
    if (turn !== choices) return false;
    say(status, "");
    hold(false);
    if (answer.problems) {
      source.wrong(answer.problems.map(({ message }) => translated(message)));
      return false;
    }
    known = answer;
    taken();
    draw();
    forget();
    return true;
  }

  // What was refused is not what is in the form now.
  function forget() {
    blameFields(fields, wrong, []);
    lines.hidden = true;
  }

  // While that is read, the form is about something else: what somebody wrote would be lost, and what they ordered not what they chose.
  function hold(now) {
    reading = now;
    for (const part of form.children) part.toggleAttribute("inert", now && part !== source.root && !part.contains(cancel));
    allow();
  }

  function allow() {
    go.disabled = side.disabled = job !== null || reading;
  }

  function taken() {
    const { choice } = known;
    if (!choice.draws) return;
    const base = draft.family === choice.family && draft.texts[BASE];
    const knows = known.model.some((spec) => spec.name === BASE && spec.default);
    const texts = { prompt: choice.words || draft.texts.prompt || "" };
    // A LoRA file that does not tell its base is drawn on the one that was there.
    if (base && base !== "toy" && !knows) texts[BASE] = base;
    Object.assign(draft, { with: choice.with, family: choice.family, texts });
    if (!choice.edits) draft.images = [];
    draft.loras = choice.loras.map((name) => ({ name, weight: "1", typed: !known.loras.some((each) => each.name === name) }));
    comparing.set({ prompts: choice.prompts });
    keep();
  }

  // "Try it" in Runs leaves the name of a run.
  async function tryRun() {
    const name = sessionStorage.getItem("kl.try");
    if (!name || !known) return;
    sessionStorage.removeItem("kl.try");
    const before = choices;
    hold(true);
    const now = await ask(`/kl/predict/now?${me}`).catch((error) => tell(error.message));
    if (choices !== before) return;
    hold(false);
    if (!now) return;
    Object.assign(known, now);
    const saved = known.saved.find((each) => each.run === name);
    if (!saved) source.wrong([t`${name} has saved nothing that can be drawn with.`]);
    else {
      views.radios.get("draw").click();
      if (await choose(saved.name, saved.family)) bring(form);
    }
  }
  addEventListener("kl-try", tryRun);

  // What the studio says anew: files of runs, earlier predictions, whether anything can be freed.
  function listen() {
    loras.renew();
    source.renew();
    strip.show(known.history, view.entry() && view.entry().folder);
    free.hidden = !known.mayFree || !known.holdsMemory;
    free.disabled = known.busy > 0;
    warn();
    const others = job || !known.busy ? "" : t`Predictions of other pages under way: ${known.busy}.`;
    // The last word on an order of this page stays until there is something else to say.
    if (!status.textContent || status.textContent === status.dataset.others) say(status, (status.dataset.others = others));
  }

  // What will happen when this draws beside a training run on the same device.
  function warn() {
    const chosen = ["transformer_device", "vae_device", "text_encoder_device"].map((name) => fields.get(name) && fields.get(name).read().trim());
    const mine = new Set(chosen.map((device) => device || known.home));
    const both = known.training.filter(({ devices }) => devices.some((device) => mine.has(device)));
    beside.hidden = !both.length;
    const names = listed(both.map(({ run }) => run.replace(/^\d{8}-\d{6}(_\d+)?-/, "")));
    const cost = mine.has("cpu") ? t`both will be slower, and the host RAM holds both models` : t`both will be slower, and the run ends or falls back where the memory is not enough for both`;
    beside.textContent = both.length ? t`Training on ${listed([...mine])} now: ${names}. If you draw there, ${cost}. Wait until it has ended, or choose other devices under Devices and memory.` : "";
  }

  // ---- the form

  // The licence of the base model, whoever has named it.
  const licence = (() => {
    const text = make("p", { class: "kl-note", id: "kl-inf-licence", hidden: true });
    let timer = 0;
    async function look() {
      const name = fields.get(BASE).read().trim();
      const answer = await ask(`/kl/predict/base?family=${encodeURIComponent(known.choice.family)}&name=${encodeURIComponent(name)}`).catch(() => ({ licence: "" }));
      if (name !== fields.get(BASE).read().trim()) return;
      say(text, translated(answer.licence));
      text.hidden = !answer.licence;
    }
    return { root: text, look, soon: () => {
      clearTimeout(timer);
      timer = setTimeout(look, 300);
    } };
  })();

  const source = sourceChoice();
  const images = makeSlots({ root, draft, keep, known: () => known, status, address });
  const loras = loraRows();
  const memory = make("div", { class: "kl-inf-memory" });
  let forecast = null; // for a page that draws with all there is
  const makeForecast = () => makeMemory(memory, {
    prefix: "kl-inf",
    address: `/kl/predict/memory?${me}`,
    gpus: "/kl/predict/gpus",
    order: (card, cpu) => ({ ...ordered(), loras: draft.loras.map(({ name, weight }) => ({ name, weight })), card, cpu }),
    use: ({ texts }) => {
      for (const [name, text] of Object.entries(texts)) {
        if (!fields.has(name)) continue;
        fields.get(name).set(text);
        draft.texts[name] = text;
      }
      keep();
    },
    mayCompute: true,
    nothing: t`No memory option makes it fit; take a smaller size or a smaller base model.`,
  });
  const comparing = makeAxes({ known: () => known, draft, keep, mine, fold });
  comparing.set(draft.axes);

  function draw() {
    fields.clear();
    fields.set("draw_with", source.field);
    fields.set("family", source.field);
    fields.set("images", images.field);
    fields.set("lora", loras.field);
    fields.set("lora_weight", loras.field);
    for (const [name, field] of comparing.fields) fields.set(name, field);
    fields.set("columns", comparing.fields.get("prompts"));
    const grid = (specs, name = "") => make("div", { class: `kl-grid ${name}` }, ...specs.map(drawField));
    const words = known.first.filter((spec) => spec.name === "prompt" || spec.name === "negative_prompt");
    const folds = known.rest.map(({ title, fields: specs, name }) => fold(translated(title), ...(name === "memory" && known.choice.draws ? [memory] : []), grid(specs)));
    view.renew();
    source.root.hidden = views.root.hidden = why.hidden = !known.choice.draws;
    images.root.hidden = !known.choice.edits;
    source.draw();
    if (known.choice.draws) forecast ||= makeForecast();
    form.replaceChildren(source.root, images.root, grid(words), loras.root, grid(known.first.filter((spec) => !words.includes(spec)), "kl-inf-numbers"),
      ...(known.choice.draws ? [fold(t`Base model`, grid(known.model))] : [grid(known.model)]), ...folds, comparing.root, beside, make("div", { class: "kl-row kl-inf-go" }, status, go, side, cancel, free));
    if (known.choice.edits) images.draw();
    loras.draw();
    if (known.choice.draws && fields.has(BASE)) licence.look();
  }

  function drawField(spec) {
    if (spec.name === "prompt" || spec.name === "negative_prompt") spec = { ...spec, control: "area" };
    const change = () => {
      draft.texts[spec.name] = field.read();
      if (spec.name.endsWith("_device")) warn();
      if (spec.name === BASE && known.choice.draws) licence.soon();
      if (forecast) forecast.changed();
      if (spec.name === "seed" && field.read().trim()) lock(true);
      if (spec.name === "prompt") comparing.follow(field.read().trim());
      keep();
    };
    const beside = spec.name === "seed" ? [seedLock.root] : [];
    const field = makeField(spec, `kl-inf-${spec.name}`, change, { beside });
    if (spec.path && known.mayType) field.node.after(makeBrowse(spec, field.node));
    if (spec.name === "prompt") field.node.placeholder = known.choice.edits ? t`make the sky red` : t`what the image should show`;
    if (spec.name === "size") field.node.placeholder = t`automatic`;
    if (spec.name === "seed") field.node.placeholder = t`drawn anew`;
    if (spec.control === "area") field.node.rows = spec.name === "prompt" ? 3 : 1;
    const text = draft.texts[spec.name];
    field.set(typeof text === typeof spec.default ? text : spec.default);
    fields.set(spec.name, field);
    return field.root;
  }

  const seedLock = (() => {
    const box = make("input", { type: "checkbox", id: "kl-inf-lock" });
    box.addEventListener("change", () => lock(box.checked));
    return { box, root: make("label", { class: "kl-toggle", for: box.id }, box, make("span", { text: t`Lock` })) };
  })();
  seedLock.box.checked = !draft.random;

  function lock(locked) {
    draft.random = !locked;
    seedLock.box.checked = locked;
    keep();
  }

  // First of all: what is drawn with. Runs on this machine, newest first; the built-in models; a file, folder or hub id.
  function sourceChoice() {
    const select = make("select", { id: "kl-inf-with", "aria-describedby": "kl-inf-with-error" });
    const newest = sharp(make("img", { class: "kl-inf-source", alt: t`Newest preview of this run`, hidden: true }));
    const path = make("input", { type: "text", id: "kl-inf-path", "aria-label": t`File, folder or hub id to draw with`, placeholder: t`a path on the studio's computer, or a hub id`, autocomplete: "off", spellcheck: "false" });
    const family = make("select", { id: "kl-inf-family", "aria-label": t`Family of the model` });
    const use = make("button", { type: "button", class: "kl-button", id: "kl-inf-use", text: t`Use it`, onclick: () => go(path.value.trim(), family.value) });
    const typed = make("div", { class: "kl-inf-typed", hidden: true }, path, family, makeBrowse({ name: "draw_with", label: t`what to draw with`, path: "file" }, path), use);
    const dropping = makeDropping({ root, known: () => known, status, wrong, address: `/kl/predict/drop?${me}`, take: dropped });
    const toy = make("button", { type: "button", class: "kl-button", id: "kl-inf-toy", text: t`Draw with the built-in toy`, onclick: () => go("toy", known.choice.family) });
    const none = make("p", { class: "kl-note", hidden: true }, t`No run has saved anything to draw with yet.`, " ", toy);
    const error = make("p", { class: "kl-error", id: "kl-inf-with-error", hidden: true });
    const facts = make("p", { class: "kl-note", id: "kl-inf-about" });
    const box = make("div", { class: "kl-field kl-wide" }, make("p", { class: "kl-note kl-inf-first", text: t`Draws images from a prompt, with what you have trained, a LoRA file or any model.` }),
      make("div", { class: "kl-head" }, make("label", { for: select.id, text: t`Draw with` }), make("code", { text: "draw_with" })),
      make("div", { class: "kl-inf-with" }, newest, make("div", {}, select, typed, dropping.root, facts, licence.root)), none, error);
    const clear = () => {
      error.hidden = true;
      select.removeAttribute("aria-invalid");
    };
    const code = (given, kind) => JSON.stringify([given, kind]);
    let offered = "";

    async function go(given, kind) {
      clear();
      if (!given) {
        path.focus();
        return;
      }
      if (await choose(given, kind)) typed.hidden = !isTyped();
    }

    // Where nothing tells its family, that is asked for.
    async function dropped(given) {
      path.value = given;
      if (await choose(given, "")) return;
      select.value = OTHER;
      typed.hidden = false;
      family.focus();
    }

    function wrong(messages) {
      error.textContent = messages.map((message) => message.replace(/^(draw_with|family): /, "")).join(" ");
      error.hidden = false;
      select.setAttribute("aria-invalid", "true");
      select.focus();
    }

    const isTyped = () => known.choice.with !== "toy" && !known.saved.some((each) => each.name === known.choice.with);

    select.addEventListener("change", () => {
      clear();
      typed.hidden = select.value !== OTHER;
      if (select.value === OTHER) path.focus();
      else go(...JSON.parse(select.value));
    });

    function draw() {
      const { choice } = known;
      offered = JSON.stringify(known.saved);
      clear();
      const runs = new Map(known.saved.map((each) => [each.run, runWords(each.run, each.called)]));
      const toys = known.families.filter((each) => each.toy);
      select.replaceChildren(
        ...[...runs].map(([run, label]) => make("optgroup", { label }, ...known.saved.filter((each) => each.run === run).map((each) => make("option", { value: code(each.name, each.family), text: each.label })))),
        make("optgroup", { label: t`Built-in toys` }, ...toys.map(({ name, label: text }) => make("option", { value: code("toy", name), text: t`Toy of ${text}` }))),
        make("option", { value: OTHER, text: t`Another file, model or hub id …` }));
      family.replaceChildren(make("option", { value: "", text: t`Family: by the file` }), ...known.families.map(({ name, label: text }) => make("option", { value: name, text })));
      select.value = isTyped() ? OTHER : code(choice.with, choice.family);
      typed.hidden = !isTyped();
      if (isTyped()) path.value = choice.with;
      const saved = known.saved.find((each) => each.name === choice.with);
      newest.hidden = !saved || !saved.image;
      if (!newest.hidden) newest.src = withToken(`/kl/run/${encodeURIComponent(saved.run)}/sample/${encodeURIComponent(saved.image)}`);
      const base = known.model.find(({ name }) => name === BASE);
      facts.textContent = [saved ? runs.get(saved.run) : "", choice.label, base && base.default ? t`base ${base.default.split(/[\\/]/).pop()}` : ""].filter(Boolean).join(" · ");
      none.hidden = known.saved.length > 0 || choice.with === "toy";
      dropping.root.hidden = !known.mayType;
    }

    function renew() {
      if (offered !== JSON.stringify(known.saved) && document.activeElement !== select && known.choice.draws) draw();
    }

    return { root: box, draw, renew, wrong, field: { node: select, error, clear } };
  }

  // Files that fit what is drawn with.
  function mine() {
    return known.loras.filter((each) => !each.family || each.family === known.choice.family);
  }

  // Files of runs, newest first, or a typed path; each with its strength.
  function loraRows() {
    const list = make("div", { class: "kl-inf-loras" });
    const error = make("p", { class: "kl-error", id: "kl-inf-lora-error", hidden: true });
    const add = make("button", { type: "button", class: "kl-button", id: "kl-inf-add-lora", text: t`Add a LoRA`, onclick: () => {
      const newest = mine()[0];
      draft.loras.push({ name: newest ? newest.name : "", weight: "1", typed: !newest });
      keep();
      draw();
      find(list, ".kl-inf-lora:last-child :is(select, input)").focus();
    } });
    const help = make("p", { class: "kl-help", id: "kl-inf-lora-help" });
    const box = make("div", { class: "kl-field kl-wide" }, make("div", { class: "kl-head" }, make("h2", { text: t`LoRA files` }), make("code", { text: "lora" })), list, make("div", { class: "kl-row" }, add), error, help);
    const clear = () => {
      error.hidden = true;
      add.removeAttribute("aria-invalid");
    };
    const changed = () => {
      clear();
      wrong.hidden = lines.hidden = true;
      keep();
    };
    let offered = "";

    function choices(select, row) {
      const runs = new Map(mine().map((each) => [each.run, runWords(each.run, each.called)]));
      const there = mine().some((each) => each.name === row.name);
      select.replaceChildren(
        make("option", { value: "", text: mine().length ? t`Choose a file …` : t`No run of this family has saved a file yet` }),
        ...[...runs].map(([run, label]) => make("optgroup", { label }, ...mine().filter((each) => each.run === run).map((each) => make("option", { value: each.name, text: each.label })))),
        ...(known.mayType ? [make("option", { value: OTHER, text: t`Another file …` })] : []));
      if (row.name && !there) row.typed = known.mayType;
      select.value = row.typed ? OTHER : there ? row.name : "";
    }

    function drawRow(row, index) {
      const select = make("select", { "aria-label": t`LoRA file ${index + 1}` });
      const path = make("input", { type: "text", "aria-label": t`Path of LoRA file ${index + 1}`, placeholder: t`a path on the studio's computer`, autocomplete: "off", spellcheck: "false" });
      const weight = make("input", { type: "number", step: "0.05", "aria-label": t`Strength of LoRA file ${index + 1}`, title: t`Strength` });
      const typed = make("div", { class: "kl-control" }, path, makeBrowse({ name: "lora", label: t`LoRA file ${index + 1}`, path: "file" }, path));
      const change = () => {
        row.typed = select.value === OTHER;
        row.name = row.typed ? path.value : select.value;
        row.weight = weight.value;
        typed.hidden = !row.typed;
        changed();
        comparing.renew();
      };
      path.value = row.name;
      weight.value = row.weight;
      choices(select, row);
      typed.hidden = !row.typed;
      select.addEventListener("change", change);
      path.addEventListener("input", change);
      weight.addEventListener("input", change);
      const remove = make("button", { type: "button", class: "kl-button", "aria-label": t`Remove LoRA file ${index + 1}`, text: "×", onclick: () => {
        draft.loras.splice(index, 1);
        changed();
        draw();
        add.focus();
      } });
      return make("div", { class: "kl-inf-lora" }, select, typed, weight, remove);
    }

    function draw() {
      help.replaceChildren(...rich(translated(known.help.lora)));
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

  // On a page of one base, what is compared stands side by side like any result; the studio draws a grid in the background.
  async function compare() {
    const columns = comparing.columns();
    if (columns.length < 2) {
      comparing.root.open = true;
      tell(t`Nothing to compare: choose a LoRA file above, or checkpoints of a run under What is compared.`);
      return;
    }
    if (!known.choice.draws) {
      start(columns.map(({ label, loras }) => ({ label, loras })));
      return;
    }
    side.disabled = true;
    const before = about();
    try {
      const order = { ...ordered(), columns, ...comparing.texts(fields.get("prompt").read()) };
      const answer = await post(`/kl/compare/start?${me}`, order);
      refused(answer.problems || [], before);
      if (answer.name) {
        views.radios.get("compare").click();
        await grids.open(answer.name);
      }
    } catch (error) {
      tell(error.message);
    } finally {
      allow();
    }
  }

  function tell(text, more = []) {
    blameFields(fields, wrong, [text, ...more].filter(Boolean).map((message) => ({ option: "", message })));
  }

  // ---- an order

  const about = () => JSON.stringify([draft.with, draft.family, draft.loras, draft.images]);

  // An order is refused at its fields. Where the form has become about something else since, they are no more what was refused.
  function refused(problems, before) {
    say(status, "");
    blameFields(fields, wrong, before === about() ? problems : problems.map(({ message }) => ({ option: "", message })));
  }

  // What the form says of every image.
  function ordered() {
    const texts = Object.fromEntries([...fields].filter(([name, field]) => field.read && !comparing.fields.has(name)).map(([name, field]) => [name, field.read()]));
    if (draft.random) texts.seed = "";
    if (known.choice.draws) Object.assign(texts, { draw_with: known.choice.with, family: known.choice.family });
    return { texts, images: draft.images.map(({ name }) => name) };
  }

  async function start(variants) {
    if (job) return;
    const order = { ...ordered(), loras: draft.loras.map(({ name, weight }) => ({ name, weight })), variants: variants || [] };
    const before = about();
    go.disabled = side.disabled = true;
    lines.hidden = true;
    try {
      const answer = await post(`/kl/predict/start?${me}`, order);
      refused(answer.problems || [], before);
      if (answer.job) {
        shown(answer.job, before);
        poll();
      }
    } catch (error) {
      tell(error.message);
    } finally {
      allow();
    }
  }

  function shown(id, before = about()) {
    job = { id, about: before, previews: 0, stopping: false };
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
    const all = Math.max(1, answer.steps * Math.max(1, answer.images));
    const share = answer.steps ? Math.min(1, (answer.done * answer.steps + answer.step) / all) : null;
    bar.show(share, answer.state === "running");
    const waits = answer.state === "queued" ? t`Waiting: number ${answer.ahead} in the queue` : "";
    const counts = answer.steps && answer.step ? t`step ${answer.step} of ${answer.steps}${answer.images > 1 ? t`, image ${Math.min(answer.done + 1, answer.images)} of ${answer.images}` : ""}` : "";
    const drawn = answer.done * answer.steps + answer.step;
    const left = answer.seconds && drawn > 1 && drawn < all ? t`about ${duration((answer.seconds / drawn) * (all - drawn))} left` : "";
    say(phase, waits || [answer.cancelling ? t`Cancelling` : translated(answer.phase) || t`Starting`, counts, left].filter(Boolean).join(" · "));
    say(status, waits || (answer.cancelling ? t`Cancelling` : translated(answer.phase || "")));
  }

  async function over(answer) {
    const before = job.about;
    job = null;
    allow();
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
    say(status, { done: t`Done.`, cancelled: t`Cancelled.`, failed: t`Failed.` }[answer.state]);
    if (answer.state === "failed") blame(answer, before);
    else blameFields(fields, wrong, []);
  }

  function blame(answer, before) {
    if (answer.problems.length) refused(answer.problems, before);
    else tell(translated(answer.text), [translated(answer.advice)]);
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
      say(status, t`The model is out of memory.`);
    } catch (error) {
      tell(error.message);
    }
  }

  // ---- from what was made before

  async function reuse(entry) {
    if (known.choice.draws) {
      // What was made by 0.1 was edited by the one family that it knew.
      const former = entry.texts.draw_with === undefined;
      const given = former ? entry.texts[BASE] || "toy" : entry.texts.draw_with;
      if (!(await choose(given, former ? known.former : entry.texts.family))) return false;
    }
    const texts = { ...entry.texts };
    if (texts.true_cfg_scale !== undefined && !fields.has("true_cfg_scale")) texts.cfg_scale = texts.true_cfg_scale;
    for (const [name, text] of Object.entries(texts)) {
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
    draft.images = entry.controls.map((file) => ({ name: `${entry.folder}/${file}` }));
    draft.loras = (entry.loras || []).map((row) => ({ ...row }));
    keep();
    if (known.choice.edits) images.draw();
    loras.draw();
    blameFields(fields, wrong, []);
    say(status, t`The settings of this image are in the form; its seed is locked.`);
    return true;
  }

  // The prompt and seed of an image become a row of the next grid, with its settings in the form; several images are several rows.
  async function send(entry, seed) {
    const line = `${entry.texts.prompt.replace(/\s+/g, " ").trim()} --d ${seed}`;
    if (!(await reuse(entry))) return;
    const before = draft.sent && draft.sent.with === known.choice.with ? draft.sent.lines : [];
    const lines = [...new Set([...before, line])];
    draft.sent = { with: known.choice.with, lines };
    comparing.set({ ...draft.axes, prompts: lines.join("\n") });
    keep();
    comparing.root.open = true;
    say(status, t`Rows of the next grid: ${lines.length}. Compare draws them.`);
    bring(comparing.root);
  }

  function edit(name) {
    draft.images = [{ name }];
    keep();
    images.draw();
    const prompt = fields.get("prompt").node;
    prompt.focus();
    prompt.select();
  }
}
