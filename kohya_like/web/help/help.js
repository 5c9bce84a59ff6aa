// The Help tab: a short guide, and every option, searchable.

import schema from "../schema.js";
import { shownDefault } from "../common/field.js";
import { listed, t, translated } from "../common/language.js";
import { make, rich } from "../common/page.js";
import { plural } from "../common/words.js";
import { current, groupsOf, onChange, specsOf } from "../train/settings.js";

// Terms stand between asterisks, names between backticks.
const marked = (text) => text.split("*").flatMap((piece, index) => (index % 2 ? [make("strong", { text: piece })] : rich(piece)));

// value: labels of the families that train on a base model, and of those that train from nothing.
export function guide({ root, props }) {
  const { bases, scratch } = props.value || { bases: "", scratch: "" };
  const families = (names) => listed(names.split(", ").map(translated));
  const steps = [
    t`*Images.* Put 15 or more into one folder, each with a text file of the same name (\`cat.jpg\`, \`cat.txt\`) that says what is on it. Kohya's sub-folders \`10_token class\` work too.`,
    t`*Family and training mode.* ${families(bases)}: a LoRA beside the model, or the model itself with DreamBooth for one subject, fine-tuning for many captioned images. From nothing: ${families(scratch)}. What you have typed goes along.`,
    t`*Base model.* Give a \`.safetensors\` file, a diffusers folder or a hub id. \`toy\` is a small model of each family that is built in and trains on any computer.`,
    t`*Preset.* Choose one that fits your graphics card. You see what it would change before it does.`,
    t`*Check data set* shows how many images there are, how they will be cut, and which cannot be read.`,
    t`*Start training.* The curve and the previews appear beside the form. You may close the browser, and even the studio: the run goes on, and the Runs tab finds it again.`,
    t`*Use the file.* It lies in the run's folder and works in ComfyUI, A1111, Forge, diffusers and kohya's scripts.`,
  ];
  const good = [
    [t`Stop and go on`, t`Stop finishes the step, saves the state and ends. Resume in the Runs tab continues from there; on a CPU to the same bits as if it had never stopped.`],
    [t`The same run elsewhere`, t`Print command shows what Start runs. Paste it into a terminal here, or take the TOML to another computer.`],
    [t`From kohya, or from a LoRA`, t`Drop a configuration or a LoRA file on the Train tab: the form fills, and a report says what became of every key.`],
    [t`Which setting first?`, t`The learning rate and the number of steps decide most. If previews look burnt, halve the rate; if nothing is learned, double the steps.`],
    [t`Out of memory`, t`In this order: gradient_checkpointing on, train_batch_size down, blocks_to_swap up, transformer_quantization, then resolution down. oom_fallback does the first three by itself, in the step that did not fit.`],
    [t`Nothing leaves this computer`, t`No analytics, no fonts or scripts from elsewhere. Only a hub id as base model, or W&B when you choose it, uses the network.`],
  ];
  root.append(make("div", { class: "kl-card kl-guide" }, make("h2", { text: t`From a folder of images to a LoRA or a model` }),
    make("ol", {}, ...steps.map((text) => make("li", {}, ...marked(text)))), make("h2", { text: t`Good to know` }),
    make("dl", {}, ...good.flatMap(([term, text]) => [make("dt", { text: term }), make("dd", { text })]))));
}

export function reference({ root }) {
  const search = make("input", { type: "search", "aria-label": t`Search the options`, placeholder: t`Search the options`, autocomplete: "off" });
  const status = make("p", { class: "kl-status", role: "status" });
  const heading = make("h2", { text: t`Options` });
  const body = make("div");
  let drawn = "";
  let entries = [];
  let sections = [];

  function describe(spec, title) {
    const facts = [spec.choices && spec.choices.join(" | "), spec.unit, spec.range, spec.required ? t`required` : t`default ${shownDefault(spec)}`];
    const entry = make("div", { class: "kl-entry" }, make("dt", {}, make("code", { text: `--${spec.name}` })),
      make("dd", {}, ...rich(`${spec.help} `), make("span", { class: "kl-facts", text: facts.filter(Boolean).join(" · ") })));
    entries.push({ entry, text: `${spec.name} ${spec.label} ${spec.help} ${translated(title)}`.toLowerCase() });
    return entry;
  }

  function draw() {
    if (drawn === current.run) return;
    drawn = current.run;
    entries = [];
    heading.textContent = t`Options of ${schema.runs[drawn].label}`;
    sections = groupsOf(drawn).map(({ title, blocks }) =>
      make("section", {}, make("h3", { text: translated(title) }), make("dl", {}, ...blocks.flatMap(specsOf).map((spec) => describe(spec, title)))));
    body.replaceChildren(...sections);
    sift();
  }

  function sift() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const { entry, text } of entries) {
      entry.hidden = !words.every((word) => text.includes(word));
      count += entry.hidden ? 0 : 1;
    }
    for (const section of sections) section.hidden = [...section.querySelectorAll(".kl-entry")].every((entry) => entry.hidden);
    status.textContent = words.length ? plural(count, "option", "options") : "";
  }

  search.addEventListener("input", sift);
  // Only for somebody who looks: the tab is drawn when it is opened.
  new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && draw()).observe(search);
  onChange(() => heading.offsetParent !== null && draw());
  root.append(make("div", { class: "kl-card kl-reference" }, heading, search, status, body));
}
