// The previews of a run, before and after. A prompt may be another one from some step on; what is compared is of one prompt.

import { t } from "../common/language.js";
import { make, say, sharp } from "../common/page.js";
import { address, withToken } from "../common/studio.js";

const keyOf = (sample) => `${sample.index} ${sample.prompt}`;

// The newest sample of each prompt of a run, by place; a prompt stands before those that it replaced. samples: by step.
export function promptsOf(samples) {
  const newest = new Map(samples.map((sample) => [keyOf(sample), sample]));
  return [...newest.values()].sort((one, other) => one.index - other.index || other.step - one.step);
}

// The sample that somebody has asked for with these prompts, one a line, or undefined. before: the samples that were there then.
export function askedFor(samples, before, prompts) {
  const words = new Set(prompts.split("\n").map((line) => line.trim().split(" --")[0].trim()));
  const known = new Set(before.map((sample) => `${sample.file} ${sample.time}`));
  return samples.find((sample) => words.has(sample.prompt) && !known.has(`${sample.file} ${sample.time}`));
}

export class Previews {
  constructor(compact) {
    this.compact = compact;
    this.samples = [];
    this.awaited = null; // the prompts that somebody has asked for, and the samples before
    this.key = ""; // of the chosen prompt, empty for the first
    this.step = null; // null follows the newest
    this.strip = make("div", { class: "kr-strip", role: "group", "aria-label": t`Prompts` });
    this.before = make("img", { class: "kr-before", alt: "" });
    this.after = make("img", { class: "kr-after", alt: "" });
    this.beforeLabel = make("span", { class: "kr-corner kr-corner-left" });
    this.afterLabel = make("span", { class: "kr-corner kr-corner-right" });
    this.image = make("div", { class: "kr-pair" }, this.before, this.after, this.beforeLabel, this.afterLabel);
    this.steps = make("input", { type: "range", min: 0, max: 0, value: 0, step: 1 });
    this.steps.addEventListener("input", () => this.choose(Number(this.steps.value)));
    this.stepText = make("span", { class: "kr-value" });
    this.cut = make("input", { type: "range", min: 0, max: 100, value: 50, "aria-valuetext": t`half before, half after` });
    this.cut.addEventListener("input", () => this.wipe());
    this.caption = make("p", { class: "kr-caption" });
    this.sliders = make(
      "div",
      { class: "kr-sliders" },
      make("label", {}, make("span", { class: "kr-name" }, t`Step `, this.stepText), this.steps),
      (this.cutLabel = make("label", {}, make("span", { class: "kr-name", text: t`Before and after` }), this.cut)),
    );
    this.root = make("section", { class: "kr-previews", "aria-label": t`Previews`, hidden: true }, make("h3", { text: t`Previews` }));
    this.root.append(make("div", { class: "kr-viewer" }, this.image, make("div", { class: "kr-beside" }, this.caption, this.sliders, this.strip)));
    for (const image of [this.before, this.after]) sharp(image, this.image);
    this.wipe();
  }

  reset() {
    this.awaited = null;
    this.samples = [];
    this.step = null;
    this.key = "";
    this.root.hidden = true;
  }

  update(run, samples) {
    this.run = run;
    this.samples = samples;
    const found = this.awaited && askedFor(samples, this.awaited.before, this.awaited.prompts);
    if (found) {
      this.key = keyOf(found);
      this.step = null;
      this.awaited = null;
    }
    this.root.hidden = samples.length === 0;
    if (samples.length) this.show();
  }

  // The first image of these prompts is shown as soon as it is there.
  wait(prompts) {
    this.awaited = { prompts, before: this.samples };
  }

  url(sample, size) {
    return withToken(address(this.run, `/sample/${encodeURIComponent(sample.file)}`), `&size=${size}&m=${sample.time || 0}`);
  }

  stepsOf(key) {
    return this.samples.filter((sample) => keyOf(sample) === key);
  }

  choose(position) {
    const steps = this.stepsOf(this.shown);
    this.step = position >= steps.length - 1 ? null : steps[position].step;
    this.show();
  }

  show() {
    const prompts = promptsOf(this.samples);
    this.shown = keyOf(prompts.find((sample) => keyOf(sample) === this.key) || prompts[0]);
    const line = this.stepsOf(this.shown);
    const now = (this.step !== null && line.find((sample) => sample.step === this.step)) || line[line.length - 1];
    const first = line[0];
    this.steps.max = String(line.length - 1);
    this.steps.value = String(line.indexOf(now));
    this.steps.setAttribute("aria-valuetext", `step ${now.step}`);
    this.steps.disabled = line.length < 2;
    say(this.stepText, String(now.step));
    this.place(this.after, now);
    const alone = first === now;
    this.place(this.before, alone ? null : first);
    this.image.classList.toggle("kr-alone", alone);
    this.cutLabel.hidden = alone;
    say(this.beforeLabel, alone ? "" : t`step ${first.step}`);
    say(this.afterLabel, t`step ${now.step}`);
    say(this.caption, now.prompt || t`No prompt`);
    this.prompts(prompts, now.step);
  }

  place(image, sample) {
    image.hidden = sample === null;
    if (sample === null) return;
    const wanted = this.url(sample, "full");
    if (image.getAttribute("src") !== wanted) image.setAttribute("src", wanted);
    image.alt = t`Preview at step ${sample.step}: ${sample.prompt}`;
  }

  prompts(prompts, step) {
    this.strip.hidden = prompts.length < 2;
    while (this.strip.children.length > prompts.length) this.strip.lastChild.remove();
    prompts.forEach((prompt, place) => {
      const key = keyOf(prompt);
      let button = this.strip.querySelectorAll("button")[place];
      if (!button) {
        button = make("button", { type: "button", class: "kr-thumb" }, sharp(make("img", { alt: "", loading: "lazy" })));
        button.addEventListener("click", () => {
          this.key = button.dataset.key;
          this.show();
        });
        this.strip.append(button);
      }
      const line = this.stepsOf(key);
      const sample = line.find((each) => each.step === step) || line[line.length - 1];
      button.dataset.key = key;
      button.setAttribute("aria-pressed", String(key === this.shown));
      button.setAttribute("aria-label", t`Prompt ${place + 1}: ${sample.prompt}`);
      button.title = sample.prompt;
      const wanted = this.url(sample, "thumb");
      const image = button.querySelector("img");
      if (image.getAttribute("src") !== wanted) image.setAttribute("src", wanted);
    });
  }

  wipe() {
    const share = Number(this.cut.value);
    this.image.style.setProperty("--kl-cut", `${share}%`);
    this.cut.setAttribute("aria-valuetext", t`${share} % before, ${100 - share} % after`);
  }
}
