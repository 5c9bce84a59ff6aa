// One run, live: what it does, how far it is, its figures, plots, images and files. Polls the JSON routes of live.py once a second while it
// can be seen.

import { Console } from "../common/console.js";
import { show } from "../common/address.js";
import { shownText } from "../common/field.js";
import { phrased, t, translated } from "../common/language.js";
import { findAll, make, say } from "../common/page.js";
import { makeBar } from "../common/progress.js";
import { address, ask, Refused, repeat, withToken } from "../common/studio.js";
import { bytes, calledWords, duration, figure, grouped, moment, nameParts, plural, runWords } from "../common/words.js";
import { openTool } from "../tools/tools.js";
import { Curve } from "./curve.js";
import { Draw } from "./draw.js";
import { Gpus } from "./gpus.js";
import { Lines } from "./lines.js";
import { Matrix } from "./matrix.js";
import { Previews } from "./previews.js";
import { Times } from "./times.js";

const WORDS = {
  queued: t`Waiting`,
  running: t`Running`,
  finished: t`Finished`,
  stopped: t`Stopped`,
  failed: t`Failed`,
  died: t`Died`,
  damaged: t`Damaged`,
};
const PHASES = {
  load: t`Loading the model`,
  scan: t`Looking at the images`,
  cache: t`Filling the cache`,
  preflight: t`Preflight`,
  rehearse: t`Preflight`, // of runs of 0.1
  warmup: t`Warming up`,
  train: t`Training`,
  pause: t`Paused`,
  sample: t`Rendering previews`,
  save: t`Saving`,
  validate: t`Validating`,
  queued: t`Waits for a free device`,
  finished: t`Done`,
  stopped: t`Stopped; can be resumed`,
  failed: t`Ended with an error`,
  died: t`Ended without a word`,
  damaged: t`Its folder is damaged`,
};

export const title = (name) => nameParts(name).rest;

export const nameOf = (run) => calledWords(run) || title(run.name);

export function date(name, unix) {
  const when = nameParts(name).started || (unix ? 1000 * unix : null);
  return when ? moment(when) : "";
}

export const stateWords = (state, stopping) => (stopping ? t`Stopping` : WORDS[state] || state);

// What is known of a saved file.
function noted(note) {
  const [, step = ""] = /^step (\d+)$/.exec(note) || [];
  return step ? t`step ${step}` : note === "chosen" ? t`chosen` : translated(note);
}

const mending = ({ shown, text }) => (shown.length ? t`${phrased(shown.map(([label, before, after]) => t`${translated(label)}: ${shownText(before)} → ${shownText(after)}`))}. ${translated(text)}` : translated(text));

// Of a run that waits, as desk.places tells it.
export function waitWords({ held, not_before: time, after, after_called: called }) {
  if (held) return t`Held until it is released`;
  const told = [after && t`after ${runWords(after, called)}`, 1000 * time > Date.now() && t`at ${moment(1000 * time)}`].filter(Boolean);
  return told.length ? t`Starts ${phrased(told)}` : PHASES.queued;
}

// Of a run that was asked to end before its last step.
export const stopWords = (step) => t`stops after step ${grouped(step)}`;

export class RunView {
  // options: compact, use(run, option) for "Use these settings" (and a field to go to), open(run) for another run, missing(why) when it is gone,
  // changed() when what the list says of it is out of date
  constructor(options) {
    this.options = { changed() {}, ...options };
    this.name = "";
    const compact = options.compact;
    this.heading = make(compact ? "h3" : "h2", { class: "kr-title", tabindex: -1 });
    this.when = make("span", { class: "kr-when" });
    this.badge = make("span", { class: "kr-badge" });
    this.phase = make("span", { class: "kr-phase" });
    this.count = make("span", { class: "kr-count" });
    this.bar = makeBar();
    this.status = make("p", { class: "kr-status", role: "status" });
    this.tileBox = make("dl", { class: "kr-tiles" });
    this.cause = make("div", { class: "kr-cause", hidden: true });
    this.warnings = make("div", { class: "kr-warnings", hidden: true });
    this.curve = new Curve(compact);
    this.parts = new Lines({ compact, title: t`Parts of the loss`, about: t`Read the parts of the loss at a step`, smooth: true });
    this.measures = new Lines({ compact, title: t`Evaluations`, about: t`Read the evaluations at a step`, smooth: false });
    this.times = new Times(compact);
    this.gpus = new Gpus(compact);
    this.previews = new Previews(compact);
    this.matrix = new Matrix(compact);
    this.draw = new Draw(compact);
    this.console = new Console();
    this.files = make("section", { class: "kr-files", "aria-label": t`Files`, hidden: true }, make("h3", { text: t`Files` }));
    this.fileList = make("ul");
    this.files.append(this.fileList);
    this.actions = this.buttons();
    this.deskBox = make("div", { class: "kr-desk" });
    this.desk = null; // what draws there, once it is fetched
    this.root = make(
      "article",
      { class: compact ? "kr-run kr-compact" : "kr-run" },
      make("header", { class: "kr-head" }, make("div", { class: "kr-names" }, this.heading, this.when), this.badge),
      make("div", { class: "kr-line-two" }, this.phase, this.count),
      this.bar.root,
      compact ? null : this.actions,
      compact ? null : this.deskBox,
      this.status,
      this.cause,
      this.tileBox,
      this.curve.root,
      this.parts.root,
      this.measures.root,
      this.times.root,
      this.gpus.root,
      this.warnings,
      this.previews.root,
      this.matrix.root,
      this.draw.root,
      compact ? null : this.files,
      this.console.root,
    );
    this.root.hidden = true;
    this.asking = new AbortController();
    this.leaving = false;
    this.lasting = false; // what was said last holds of the run that has ended, too
    this.forget();
    this.poll = repeat(options.element, () => this.read());
    repeat(options.element, () => this.readMachine());
  }

  buttons() {
    const button = (label, work, kind = "") => make("button", { type: "button", class: `kr-button ${kind}`, text: label, onclick: work });
    this.stop = button(t`Stop`, () => this.order("stop", t`Asked to stop: it finishes its step, saves its state and ends.`));
    this.kill = button(t`End now`, () => this.order("stop?now=1", t`Ended without waiting; Resume continues from the last saved state.`, true), "kr-danger");
    this.resume = button(t`Resume`, () => this.order("resume", t`Continues from the last saved state.`), "kr-primary");
    this.use = button(t`Use these settings`, () => this.options.use(this.name));
    this.copy = button(t`Copy command`, () => this.copyCommand());
    this.drawButton = button(t`Draw`, () => this.draw.open());
    this.tryButton = button(t`Try it`, () => this.tryIt());
    return make("div", { class: "kr-actions", role: "group", "aria-label": t`This run` }, this.stop, this.kill, this.resume, this.tryButton, this.drawButton, this.use, this.copy);
  }

  // The Generate tab draws with what this run has saved.
  tryIt() {
    sessionStorage.setItem("kl.try", this.name);
    show("generate");
    dispatchEvent(new Event("kl-try"));
  }

  forget() {
    this.have = { generation: "", points: 0, console: -1, version: "" };
    this.command = {};
    this.partRows = [];
    this.evaluates = false;
    // In the order in which this run tells them.
    this.tiles = new Map();
    this.tileBox.replaceChildren();
  }

  // Nothing is asked of a run that is being deleted: the answer would be that there is none.
  leave(isLeaving) {
    this.leaving = isLeaving;
    this.asking.abort();
    this.asking = new AbortController();
  }

  follow(name) {
    if (name === this.name) return;
    this.name = name;
    this.leave(false);
    this.forget();
    // It keeps its room until the new run is there: on a page that is short for a moment the browser scrolls to where nobody was.
    this.root.style.visibility = "hidden";
    this.root.hidden = this.root.hidden || !name;
    this.root.dataset.state = "";
    say(this.heading, title(name));
    this.note("");
    for (const node of [this.when, this.badge, this.phase, this.count]) say(node, "");
    for (const node of [this.cause, this.warnings, this.files]) node.hidden = true;
    this.previews.reset();
    this.matrix.reset();
    this.parts.reset();
    this.measures.reset();
    this.draw.reset();
    this.gpus.reset();
    this.curve.reset();
    this.times.update([]);
    this.console.update({ reset: true, lines: [], open: "" });
    this.poll();
  }

  async read() {
    const name = this.name;
    if (!name || this.leaving) return 0.3;
    const { signal } = this.asking;
    const query = new URLSearchParams(Object.entries(this.have).map(([name, value]) => [name, String(value)]));
    try {
      const answer = await ask(address(name, `?${query}`), { signal });
      if (name !== this.name) return 0;
      this.show(answer);
      if (!answer.complete) return 0.02;
      return answer.state === "running" || answer.state === "queued" ? 1 : 4;
    } catch (error) {
      if (signal.aborted) return 0;
      this.trouble(error);
      return 2;
    }
  }

  async readMachine() {
    const name = this.name;
    const { signal } = this.asking;
    const running = !this.root.hidden && this.root.dataset.state === "running" && !this.leaving;
    if (!running) {
      this.gpus.root.hidden = true;
      return 0.5;
    }
    try {
      const answer = await ask(address(name, `/machine?since=${this.gpus.since}`), { signal });
      if (name !== this.name) return 0;
      this.gpus.update(answer);
      this.usage(answer.usage);
    } catch (error) {
      if (signal.aborted) return 0;
      // The other poll says so.
      console.info("No readings of the machine:", error.message);
    }
    return 2;
  }

  trouble(error) {
    // Of a run that was just chosen nothing is shown yet.
    this.root.hidden = !this.name;
    if (error instanceof Refused) {
      if (error.status === 404) this.options.missing();
      this.note(error.message);
    } else {
      this.lost = true;
      this.note(t`The studio does not answer. Training is not affected; trying again …`);
    }
  }

  note(text, lasting = false) {
    this.lasting = lasting;
    say(this.status, text);
  }

  async order(what, done, lasting = false) {
    try {
      await ask(address(this.name, `/${what}`), { method: "POST" });
      this.note(done, lasting);
    } catch (error) {
      this.note(error.message);
    }
    this.poll();
    this.options.changed();
  }

  async copyCommand() {
    const shell = /win/i.test(navigator.platform) ? "powershell" : "sh";
    const text = this.command[shell] || "";
    try {
      await navigator.clipboard.writeText(text);
      this.note(t`The command is in the clipboard.`);
    } catch {
      // Without https or with the permission refused there is no clipboard: show it for copying by hand.
      this.note(text);
    }
  }

  show(answer) {
    if (this.lost) {
      this.lost = false;
      this.note("");
    }
    this.root.hidden = false;
    this.root.style.visibility = "";
    const before = this.root.dataset.state;
    this.root.dataset.state = answer.state;
    if (before && before !== answer.state) {
      // What was said of a run at work, or of one that waits, is over.
      if (!this.lasting && (before === "running" || before === "queued")) this.note("");
      if (this.options.turned) this.options.turned();
      this.options.changed();
    }
    say(this.heading, nameOf(answer));
    say(this.when, `${calledWords(answer) ? `${title(answer.name)}, ` : ""}${date(answer.name, answer.started)}${answer.terminal ? t`, from a terminal` : ""}`);
    this.showDesk(answer);
    this.badge.dataset.state = answer.state;
    say(this.badge, stateWords(answer.state, answer.stopping));
    this.progress(answer);
    const fresh = answer.generation !== this.have.generation;
    this.curve.update(answer, fresh);
    this.figures(answer);
    this.times.update(this.curve.points);
    this.console.update(answer.console);
    if (answer.samples) this.lists(answer);
    this.partsOfLoss(answer, fresh);
    this.why(answer);
    this.have = { generation: answer.generation, points: this.curve.points.length, console: answer.console.offset, version: answer.version };
    const active = answer.state === "running" || answer.state === "queued";
    const buttons = findAll(this.actions, "button");
    const focus = buttons.find((each) => each === document.activeElement);
    this.stop.hidden = !active || answer.stopping;
    this.kill.hidden = !answer.stopping;
    this.tryButton.classList.toggle("kr-primary", answer.state === "finished");
    this.resume.hidden = active || answer.state === "finished" || answer.state === "damaged" || Boolean(answer.cause && answer.cause.refused);
    this.copy.hidden = !this.command.sh;
    // The button that was pressed goes; the keyboard stays where it was.
    if (focus && focus.hidden) buttons.find((each) => !each.hidden).focus();
  }

  async showDesk(answer) {
    if (this.options.compact) return;
    this.desk ||= import("./desk.js").then(({ makeDesk }) => makeDesk(this, this.deskBox));
    const desk = await this.desk;
    if (answer.name === this.name) desk.show(answer);
  }

  partsOfLoss(answer, fresh) {
    if (fresh) this.partRows = [];
    this.partRows.length = Math.min(this.partRows.length, answer.first);
    this.partRows.push(...answer.points.map((point, place) => [point[0], ...answer.parts[place]]));
    this.parts.take(answer.part_names, this.partRows, this.evaluates && !this.options.compact);
  }

  progress(answer) {
    const steps = answer.steps ? t`${grouped(answer.step)} of ${grouped(answer.steps)} steps` : answer.step ? t`${grouped(answer.step)} steps` : "";
    const parts = [];
    let phase = PHASES[answer.phase] || answer.phase || t`Starting`;
    if (answer.state === "queued") phase = waitWords(answer.queue || {});
    if (answer.phase === "sample" && this.evaluates) phase = t`Evaluating`;
    if (answer.phase === "cache") {
      const cached = Object.entries(answer.cached).map(([what, [done, total]]) => what === "text" ? t`captions ${done} of ${total}` : t`images ${done} of ${total}`);
      if (cached.length) phase = t`${phase}: ${phrased(cached)}`;
    }
    if (answer.stopping) phase = answer.ends_in_seconds ? t`Stopping: ends by force in ${duration(answer.ends_in_seconds)} at the latest` : t`Stopping`;
    if (steps) parts.push(steps);
    if (answer.stop_step) parts.push(stopWords(answer.stop_step));
    if (answer.eta_seconds !== null && answer.step) parts.push(t`${duration(answer.eta_seconds)} left`);
    say(this.phase, phase);
    say(this.count, parts.join(" · "));
    this.bar.show(answer.fraction, answer.state === "running");
    this.bar.root.setAttribute("aria-valuetext", phrased([phase, ...parts]));
  }

  figures(answer) {
    const last = this.curve.points[this.curve.points.length - 1];
    const rate = last ? last[5] : null;
    const seconds = answer.seconds_per_step;
    const speed = seconds ? (seconds >= 1 ? t`${figure(seconds, 3)} s/step` : t`${figure(1 / seconds, 3)} steps/s`) : null;
    this.tile(t`Loss`, answer.loss === null ? null : figure(answer.loss), last ? t`smoothed ${figure(last[4])}` : "");
    this.tile(t`Learning rate`, rate === null ? null : figure(rate, 3), "");
    this.tile(t`Speed`, speed, answer.images_per_second ? t`${figure(answer.images_per_second, 3)} images/s` : "");
    this.tile(t`Peak memory`, answer.peak_gib ? `${figure(answer.peak_gib, 3)} GiB` : null,
      answer.forecast_gib ? t`${figure(answer.forecast_gib, 3)} GiB were forecast` : t`of the training`);
    const wait = answer.data_fetch && seconds ? (100 * answer.data_fetch) / seconds : null;
    this.tile(t`Waiting for data`, wait === null ? null : `${figure(wait, 2)} %`, t`of a step`);
    this.session(answer);
    if (answer.state !== "running") this.usage(null);
  }

  session({ session, total, sessions }) {
    const pauses = (seconds) => (seconds >= 0.5 ? t`, ${duration(seconds)} in pauses` : "");
    const steps = plural(session.steps, "step", "steps", grouped(session.steps));
    this.tile(t`This session`, session.steps ? duration(session.trained_seconds) : null, `${steps}${pauses(session.paused_seconds)}`);
    const many = sessions > 1 || (sessions === 1 && !session.steps);
    this.tile(t`In total`, many ? duration(total.trained_seconds) : null, `${plural(sessions, "session", "sessions")}${pauses(total.paused_seconds)}`);
  }

  usage(usage) {
    this.tile(t`Processor`, usage && usage.cpu_percent !== undefined ? `${Math.round(usage.cpu_percent)} %` : null, t`100 % is one core`);
    this.tile(t`Memory now`, usage ? `${figure(usage.memory_gib, 3)} GiB` : null, usage ? t`of ${figure(usage.memory_total_gib, 3)} GiB` : "");
  }

  tile(name, value, note) {
    let tile = this.tiles.get(name);
    if (!tile) {
      if (value === null) return;
      tile = { value: make("dd", { class: "kr-figure" }), note: make("dd", { class: "kr-note" }) };
      tile.root = make("div", { class: "kr-tile" }, make("dt", { text: name }), tile.value, tile.note);
      this.tiles.set(name, tile);
      this.tileBox.append(tile.root);
    }
    tile.root.hidden = value === null;
    say(tile.value, value || "");
    say(tile.note, note);
  }

  lists(answer) {
    this.command = answer.command;
    this.previews.update(answer.name, answer.samples);
    this.evaluates = answer.evaluates;
    this.matrix.update(answer);
    this.measures.take(answer.measure_names, answer.measures, !this.options.compact);
    this.draw.update(answer.name, answer.draws, answer.samples);
    // Verify knows files for a base model, not models of a family that draws by itself.
    this.drawsImages = answer.draws !== "";
    this.drawButton.hidden = !this.drawsImages;
    say(this.drawButton, this.draw.words.button);
    this.tryButton.hidden = answer.evaluates || !answer.files.some(({ name }) => /(\.safetensors|model_index\.json)$/i.test(name));
    this.warnings.hidden = answer.warnings.length === 0;
    const items = answer.warnings.map(([text, count]) => make("li", { text: count > 1 ? t`${translated(text)} (${count} times)` : translated(text) }));
    this.warnings.replaceChildren(make("h3", { text: items.length === 1 ? t`Warning` : t`Warnings` }), make("ul", {}, ...items));
    this.files.hidden = answer.files.length === 0;
    const links = answer.files.map((file) => {
      const href = withToken(address(answer.name, `/file/${file.name.split("/").map(encodeURIComponent).join("/")}`));
      const about = [...file.note.split(" · ").map(noted), bytes(file.bytes)].filter(Boolean).join(" · ");
      return make("li", {}, make("a", { href, download: file.name.split("/").pop(), text: file.name }), make("span", { class: "kr-size", text: about }), this.verifier(file));
    });
    this.fileList.replaceChildren(...links);
  }

  verifier(file) {
    if (!/\.safetensors$/i.test(file.name) || this.drawsImages) return null;
    return make("button", { type: "button", class: "kr-button", text: t`Verify`, "aria-label": t`Verify ${file.name}`, onclick: () => openTool("verify_lora", { model: file.path }) });
  }

  why(answer) {
    const cause = answer.cause;
    this.cause.hidden = !cause;
    const key = JSON.stringify(cause || null);
    if (!cause || key === this.causeShown) return;
    this.causeShown = key;
    const lines = cause.lines.length ? make("pre", { class: "kr-lines", tabindex: 0, "aria-label": t`Last lines of the log`, text: cause.lines.join("\n") }) : null;
    this.cause.replaceChildren(
      make("h3", { text: translated(cause.text) }),
      cause.why ? make("p", { text: translated(cause.why) }) : "",
      cause.advice ? make("p", { text: translated(cause.advice) }) : "",
      cause.fix ? make("div", { class: "kr-fix" }, make("p", { text: mending(cause.fix) }), make("button", { type: "button", class: "kr-button kr-primary", text: translated(cause.fix.button), onclick: () => this.mend(cause.fix) })) : "",
      ...(lines ? [make("p", { class: "kr-note", text: t`Last lines of the log` }), lines] : []),
    );
    // The newest line says most.
    if (lines) lines.scrollTop = lines.scrollHeight;
  }

  // What the button of a failure does; where a person has to decide, it leads there.
  async mend(fix) {
    if (fix.goes_to === "form") return this.options.use(this.name, fix.option);
    if (fix.goes_to === "disk") return (await import("./tidy.js")).openTidy(() => this.poll());
    try {
      const { run } = await ask(address(this.name, "/fix"), { method: "POST" });
      if (run !== this.name) this.options.open(run);
      this.note(t`Started again.`);
    } catch (error) {
      this.note(error.message);
    }
    return this.poll();
  }
}
