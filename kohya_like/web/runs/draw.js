// The Draw panel of a run: a form for the tool that draws with its saved files, the drawing under way, and the images that came out. Talks
// with the routes of kohya_like/drawing.py; the form is made when the panel is opened.

import { blame, makeField } from "../common/field.js";
import { t } from "../common/language.js";
import { make, say, sharp } from "../common/page.js";
import { makeBar } from "../common/progress.js";
import { store, stored } from "../common/stored.js";
import { ask, post, repeat, withToken } from "../common/studio.js";
import { figure, moment } from "../common/words.js";
import { imageField } from "./image_field.js";

const DRAFT = "kl.draw";
const OPEN = "kl.draw.open";
const ENDED = { finished: t`Finished`, failed: t`Failed`, cancelled: t`Cancelled`, died: t`Ended without a word` };
// What each tool calls what it does; the title of a start is made from the texts of its form.
const DRAWING = {
  heading: t`Draw images with this model`, button: t`Draw`, go: t`Draw`, states: { running: t`Drawing`, ...ENDED }, one: t`Drawing`, before: t`Drawn before`,
  progress: t`Progress of the drawing`, strip: t`Images of this drawing`, all: t`All images as one grid`, none: t`This run has saved no model yet. It can draw as soon as it has.`,
  title: ({ prompt }) => prompt || t`No prompt`,
};
const DEEDS = {
  draw: DRAWING,
  transfer: {
    ...DRAWING, heading: t`Transfer a style`, button: t`Transfer a style`, go: t`Transfer`, states: { running: t`Transferring`, ...ENDED }, one: t`Transfer`, before: t`Transferred before`,
    progress: t`Progress of the transfer`, strip: t`Images of this transfer`, all: t`Each image beside what became of it`,
    none: t`This run has saved no model yet. Styles can be transferred as soon as it has.`, title: ({ target }) => (target ? t`To ${target}` : t`No style`),
  },
};

const address = (run, rest = "") => `/kl/draw/${encodeURIComponent(run)}${rest}`;

export class Draw {
  constructor(compact) {
    this.prefix = compact ? "kl-draw-side" : "kl-draw";
    this.words = DRAWING;
    this.status = make("p", { class: "kr-status", role: "status" });
    this.form = make("div", { class: "kl-part kr-draw-form" });
    this.result = this.resultView();
    this.before = make("section", { class: "kr-draw-before", hidden: true });
    this.body = make("div", { class: "kr-draw-body" }, make("div", {}, this.form, this.status), make("div", {}, this.result.root, this.before));
    this.heading = make("summary");
    this.root = make("details", { class: "kr-fold kr-draw", hidden: true }, this.heading);
    this.root.addEventListener("toggle", () => {
      if (this.root.open) this.root.append(this.body);
      else this.body.remove();
      if (this.root.open) sessionStorage.setItem(OPEN, this.run);
      else if (sessionStorage.getItem(OPEN) === this.run) sessionStorage.removeItem(OPEN);
      this.poll();
    });
    this.reset();
    this.poll = repeat(this.root, () => this.turn());
  }

  reset() {
    this.run = "";
    this.known = null;
    this.name = ""; // the start that is shown
    this.offset = -1;
    this.state = "";
    this.stale = false;
    this.root.hidden = true;
    this.form.replaceChildren();
    say(this.status, "");
    this.result.clear();
    this.before.hidden = true;
  }

  // What the view of the run has learned: what its tool does, empty for none, and that its files may have changed.
  update(run, deed, samples) {
    if (run !== this.run) {
      this.reset();
      this.run = run;
      this.words = DEEDS[deed] || DRAWING;
      say(this.heading, this.words.heading);
      this.before.setAttribute("aria-label", this.words.before);
      this.result.rename();
      this.root.open = sessionStorage.getItem(OPEN) === run;
    }
    this.root.hidden = !deed;
    this.example = samples.length ? samples[0].prompt : "";
    this.stale = true;
  }

  open() {
    this.root.open = true;
    this.root.scrollIntoView({ block: "start" });
    this.heading.focus();
  }

  async turn() {
    if (!this.root.open || !this.run) return 0.3;
    const run = this.run;
    try {
      if (!this.known || this.stale) await this.learn(run);
      if (run !== this.run || !this.name || (this.state && this.state !== "running")) return 1;
      await this.follow(run);
      return this.state === "running" ? 0.7 : 0.1;
    } catch (error) {
      if (run === this.run) say(this.status, error.message);
      return 3;
    }
  }

  async learn(run) {
    const known = await ask(address(run));
    if (run !== this.run) return;
    const first = !this.known;
    this.known = known;
    this.stale = false;
    if (first) this.drawForm();
    this.offer();
    if (first && known.runs.length) this.show((known.runs.find((each) => each.state === "running") || known.runs[0]).name);
    this.list();
  }

  // ---- the form

  drawForm() {
    const { fields: specs } = this.known;
    const drafts = stored(DRAFT) || {};
    const draft = (drafts[this.known.name] = drafts[this.known.name] || {});
    this.fields = new Map();
    const field = (spec) => {
      const keep = () => {
        draft[spec.name] = made.read();
        store(DRAFT, drafts);
      };
      const ident = `${this.prefix}-${spec.name}`;
      const made = spec.name === "image" ? imageField(spec, ident, keep, this.known.maxBytes)
        : spec.name === "target" && spec.suggestions ? this.choiceField(spec, ident, keep) : makeField(spec, ident, keep);
      // What the model was shown says best what it can be asked for.
      const first = spec.name === "prompt" ? this.example : spec.default;
      made.set(typeof draft[spec.name] === typeof spec.default ? draft[spec.name] : first);
      made.keep = keep;
      made.node.addEventListener("keydown", (event) => event.key === "Enter" && event.target.tagName === "INPUT" && this.start());
      if (/prompt/.test(spec.name)) made.root.classList.add("kl-wide");
      this.fields.set(spec.name, made);
      return made.root;
    };
    const basic = specs.filter((spec) => spec.basic).map(field);
    const rest = specs.filter((spec) => !spec.basic).map(field);
    this.model = this.modelField();
    this.wrong = make("div", { class: "kl-error", role: "alert", hidden: true });
    this.go = make("button", { type: "button", class: "kl-button kl-strong", text: this.words.go, onclick: () => this.start() });
    this.form.replaceChildren(
      make("div", { class: "kl-grid" }, this.model.root, ...basic),
      rest.length ? make("details", { class: "kl-tool-more" }, make("summary", { text: t`More` }), make("div", { class: "kl-grid" }, ...rest)) : "",
      this.wrong,
      make("div", { class: "kl-row" }, this.go),
    );
  }

  // A text with what it most often is as buttons under it.
  choiceField(spec, ident, keep) {
    const { suggestions, ...plain } = spec;
    const buttons = suggestions.map((text) => make("button", { type: "button", class: "kr-chip", text, "aria-label": `${spec.label}: ${text}`, onclick: () => {
      field.set(text);
      field.clear();
      keep();
    } }));
    const mark = () => buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === field.node.value)));
    const field = makeField(plain, ident, () => {
      mark();
      keep();
    }, { below: make("div", { class: "kr-toggles kr-choices", role: "group", "aria-label": t`${spec.label}s of this model` }, ...buttons) });
    return {
      ...field,
      set(text) {
        field.node.value = text;
        mark();
      },
    };
  }

  // The saved files of the run in place of a path.
  modelField() {
    const id = `${this.prefix}-ckpt`;
    const node = make("select", { id, "aria-describedby": `${id}-help` });
    const error = make("p", { class: "kl-error", id: `${id}-error`, hidden: true });
    const help = make("p", { class: "kl-help", id: `${id}-help`, text: t`A file that this run has saved.` });
    const root = make("div", { class: "kl-field kl-wide" }, make("div", { class: "kl-head" }, make("label", { for: id, text: t`Model` })), make("div", { class: "kl-control" }, node), error, help);
    const field = {
      root, node, error,
      clear: () => {
        error.hidden = true;
        node.removeAttribute("aria-invalid");
      },
      read: () => node.value,
      set: (text) => [...node.options].some((option) => option.value === text) && (node.value = text),
    };
    node.addEventListener("change", field.clear);
    this.fields.set("ckpt", field);
    return field;
  }

  offer() {
    const { models } = this.known;
    const { node } = this.model;
    const chosen = node.value;
    node.replaceChildren(...models.map((name) => make("option", { value: name, text: name })));
    if (models.includes(chosen)) node.value = chosen;
    this.go.disabled = models.length === 0 || this.state === "running";
    if (!models.length) say(this.status, this.words.none);
    else if (this.status.textContent === this.words.none) say(this.status, "");
  }

  fill(texts) {
    for (const [name, field] of this.fields) {
      if (!(name in texts)) continue;
      field.set(texts[name]);
      if (field.keep) field.keep();
    }
    this.fields.get(Object.keys(texts).find((name) => this.fields.has(name))).root.scrollIntoView({ block: "nearest" });
  }

  async start() {
    if (this.go.disabled) return;
    const run = this.run;
    this.go.disabled = true;
    say(this.status, "");
    try {
      const texts = Object.fromEntries([...this.fields].map(([name, field]) => [name, field.read()]));
      const answer = await post(address(run), { texts });
      if (run !== this.run) return;
      blame(this.fields, this.wrong, answer.problems || []);
      if (answer.run) {
        this.known.runs.unshift({ ...answer.run, prompt: texts.prompt || "", target: texts.target || "" });
        this.show(answer.run.name);
      }
    } catch (error) {
      say(this.status, error.message);
    } finally {
      this.go.disabled = this.state === "running" || !this.known.models.length;
      this.poll();
    }
  }

  // ---- one drawing

  show(name) {
    this.name = name;
    this.offset = -1;
    this.state = "";
    this.result.clear();
    this.list();
  }

  async follow(run) {
    const name = this.name;
    const answer = await ask(address(run, `/${encodeURIComponent(name)}?console=${this.offset}`));
    if (run !== this.run || name !== this.name) return;
    this.offset = answer.console.offset;
    this.state = answer.state;
    this.result.update(answer, name);
    this.go.disabled = this.state === "running" || !this.known.models.length;
    const row = this.known.runs.find((each) => each.name === name);
    if (row && row.state !== answer.state) {
      row.state = answer.state;
      this.list();
    }
  }

  async cancel() {
    try {
      await ask(`/kl/tools/run/${encodeURIComponent(this.name)}/cancel`, { method: "POST" });
    } catch (error) {
      say(this.status, error.message);
    }
    this.poll();
  }

  list() {
    const rows = this.known.runs.filter((each) => each.name !== this.name);
    this.before.hidden = rows.length === 0;
    this.before.replaceChildren(make("h3", { text: this.words.before }), make("ul", {}, ...rows.map((each) => make("li", {},
      make("button", { type: "button", class: "kl-link", text: this.words.title(each), onclick: () => { this.show(each.name); this.poll(); } }),
      make("span", { class: "kr-note", text: ` ${moment(1000 * each.started)}${each.state === "finished" ? "" : `, ${this.words.states[each.state].toLowerCase()}`}` })))));
  }

  resultView() {
    const title = make("h3");
    const badge = make("span", { class: "kr-badge" });
    const bar = makeBar();
    const line = make("p", { class: "kr-note kr-draw-line" });
    const cancel = make("button", { type: "button", class: "kr-button", text: t`Cancel`, onclick: () => { cancel.disabled = true; this.cancel(); } });
    const wrong = make("pre", { class: "kr-lines kr-draw-wrong", tabindex: 0, role: "alert", hidden: true });
    const large = make("img", { alt: "" });
    const given = make("img", { alt: "" });
    const source = make("figure", { hidden: true }, given, make("figcaption", { class: "kr-note" }));
    const chosen = make("div", { class: "kr-draw-chosen" }, large);
    sharp(given, source);
    sharp(large, chosen);
    const caption = make("p", { class: "kr-caption" });
    const strip = make("div", { class: "kr-draw-strip", role: "group" });
    const facts = make("p", { class: "kr-note" });
    const download = make("a", { class: "kr-button", text: t`Download` });
    const seed = make("button", { type: "button", class: "kr-button" });
    const reuse = make("button", { type: "button", class: "kr-button", text: t`Use these settings` });
    const images = make("div", { class: "kr-draw-images", hidden: true }, make("div", { class: "kr-draw-pair" }, source, chosen), strip,
      caption, facts, make("div", { class: "kr-actions" }, download, seed, reuse));
    const root = make("section", { class: "kr-draw-result", hidden: true },
      make("div", { class: "kr-head" }, title, badge), bar.root, line, cancel, wrong, images);
    let shown = "";

    const clear = () => {
      root.hidden = true;
      shown = "";
      cancel.disabled = false;
      images.hidden = true;
      wrong.hidden = true;
    };

    const rename = () => {
      root.setAttribute("aria-label", this.words.one);
      bar.root.setAttribute("aria-label", this.words.progress);
      strip.setAttribute("aria-label", this.words.strip);
    };

    const choose = (image, answer, name) => {
      const place = address(this.run, `/${encodeURIComponent(name)}/${encodeURIComponent(image.file)}`);
      large.src = withToken(place);
      large.alt = image.grid ? this.words.all : t`Image with seed ${image.seed}: ${answer.texts.target ? this.words.title(answer.texts) : answer.texts.prompt || t`no prompt`}`;
      source.hidden = !answer.source || image.grid;
      if (!source.hidden) {
        given.src = withToken(address(this.run, `/${encodeURIComponent(name)}/${encodeURIComponent(answer.source)}`));
        given.alt = t`The image as given`;
        const [style] = (answer.report && answer.report.sources) || [];
        say(source.lastChild, t`As given${typeof style === "string" ? t`, taken as ${style || t`no style in particular`}` : ""}`);
      }
      say(caption, image.grid ? t`All images in one file` : t`Seed ${image.seed}`);
      download.href = withToken(place, "&save=1");
      seed.hidden = image.seed === null;
      seed.textContent = t`Use seed ${image.seed} again`;
      seed.onclick = () => this.fill({ seed: String(image.seed) });
      for (const button of strip.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.file === image.file));
    };

    const fill = (answer, name) => {
      reuse.onclick = () => this.fill(answer.texts);
      strip.replaceChildren(...answer.images.map((image, place) => {
        const small = sharp(make("img", { src: withToken(address(this.run, `/${encodeURIComponent(name)}/${encodeURIComponent(image.file)}`)), alt: "", loading: "lazy" }));
        const label = image.grid ? t`All images in one file` : t`Image ${place + 1}, seed ${image.seed}`;
        const button = make("button", { type: "button", class: "kr-thumb", "data-file": image.file, "aria-label": label, title: label }, small);
        button.addEventListener("click", () => choose(image, answer, name));
        return button;
      }));
      const { report = {}, texts } = answer;
      say(facts, [texts.ckpt, texts.strength && t`strength ${texts.strength}`, texts.sampler && t`${texts.sampler}, ${texts.steps} steps`, texts.cfg && t`guidance ${texts.cfg}`,
        report.seconds_per_image ? t`${figure(report.seconds_per_image, 2)} s per image` : "",
        report.network_calls ? t`${report.network_calls} network calls` : ""].filter(Boolean).join(" · "));
      images.hidden = answer.images.length === 0;
      // With the given image beside it, one result says more than a sheet.
      if (answer.images.length) choose((!answer.source && answer.images.length > 2 && answer.images.find((image) => image.grid)) || answer.images[0], answer, name);
    };

    const update = (answer, name) => {
      root.hidden = false;
      const running = answer.state === "running";
      say(title, this.words.title(answer.texts));
      badge.dataset.state = answer.state === "cancelled" ? "stopped" : answer.state;
      say(badge, this.words.states[answer.state]);
      bar.root.hidden = cancel.hidden = line.hidden = !running;
      bar.show(answer.percent === null ? null : answer.percent / 100, running);
      say(line, answer.console.open || answer.console.lines[answer.console.lines.length - 1] || t`Starting …`);
      wrong.hidden = answer.state !== "failed" && answer.state !== "died";
      if (!wrong.hidden && answer.error) say(wrong, answer.error);
      const key = `${name} ${answer.state}`;
      if (answer.state !== "finished" || key === shown) return;
      shown = key;
      fill(answer, name);
    };

    return { root, clear, rename, update };
  }
}
