// The editor of sample prompts: rows that read and write kohya's text (`a prompt --w 512 --n blurry`), one prompt a line. The text stays
// what is kept and sent.

import { t } from "../common/language.js";
import { find, make } from "../common/page.js";
import { store, stored } from "../common/stored.js";
import { isFile, parse, serialise, setFlag, setFurther, strip, written } from "./prompt_lines.js";
import { current, drafts, fieldsOf } from "./settings.js";

const MODE = "kl.prompts";

// ---- what a prompt without a flag gets, from the other fields

function defaults(place) {
  const values = drafts[current.run];
  const size = String(values.sample_size || values.resolution || "").split(/[\s,x]+/).filter(Boolean);
  const seed = String(values.seed || "").trim();
  return {
    w: size[0] || "", h: size[1] || size[0] || "", s: values.sample_steps, l: values.sample_cfg_scale, g: values.sample_guidance_scale,
    n: values.sample_negative_prompt || "none", ss: values.sample_sampler, d: /^\d+$/.test(seed) ? String((BigInt(seed) + BigInt(place)) % 2n ** 63n) : "",
  };
}

function columns() {
  const specs = new Map(fieldsOf(current.run).map((spec) => [spec.name, spec]));
  const sampler = specs.get("sample_sampler");
  return [
    { flag: "n", label: t`Negative prompt`, wide: true },
    { flag: "w", label: t`Width` }, { flag: "h", label: t`Height` }, { flag: "d", label: t`Seed` }, { flag: "s", label: t`Steps` },
    { flag: "l", label: t`CFG`, decimal: true },
    ...(specs.has("control_data_dir") ? [{ flag: "ci", label: t`Control image`, wide: true }] : []),
    ...(specs.has("sample_guidance_scale") ? [{ flag: "g", label: t`Guidance`, decimal: true }] : []),
    ...(sampler ? [{ flag: "ss", label: t`Sampler`, choices: sampler.choices }] : []),
  ];
}

// ---- the editor

export function promptRows({ spec, node, head, body, label, write }) {
  const rows = make("div", { class: "kl-prompts", role: "group", "aria-labelledby": "kl-prompts-label" });
  const note = make("p", { class: "kl-note", text: t`This is the path of a file; its prompts are used.`, hidden: true });
  const toggle = make("button", { type: "button", class: "kl-reset", text: t`As text`, "aria-pressed": "false" });
  const add = make("button", { type: "button", class: "kl-button", text: t`Add a prompt`, onclick: () => insert(lines.length) });
  let lines = [];
  let text = "";
  let open = new Set(); // places of prompts whose details are open
  let drawing = false;
  let asText = stored(MODE) === "text";
  label.id = "kl-prompts-label";
  head.insertBefore(toggle, head.querySelector("code"));
  body.classList.add("kl-prompt-body");
  body.prepend(rows, add, note);
  node.addEventListener("input", () => (text = node.value));
  toggle.addEventListener("click", () => {
    asText = !asText;
    store(MODE, asText ? "text" : "rows");
    set(text);
  });

  const prompts = () => lines.filter((line) => line.flags);

  function set(next) {
    text = next;
    const file = isFile(text);
    const plain = asText || file;
    toggle.setAttribute("aria-pressed", String(asText));
    node.hidden = !plain;
    rows.hidden = add.hidden = plain;
    note.hidden = !file;
    label.htmlFor = plain ? node.id : "kl-prompt-0";
    if (plain) return;
    lines = parse(text);
    if (!prompts().length) lines.push({ raw: "", end: "", prompt: "", flags: [] });
    draw();
  }

  function send() {
    text = serialise(lines);
    write(text);
  }

  // After typing that made other lines or flags of it: `a --w 512` in the field of the prompt, several lines, a comment.
  function reread() {
    const focused = document.activeElement && document.activeElement.id;
    set(text);
    const again = focused && document.getElementById(focused);
    if (again) again.focus();
  }

  function insert(place) {
    if (place > 0 && !lines[place - 1].end) lines[place - 1].end = "\n";
    const line = { raw: "", end: place < lines.length ? "\n" : "", prompt: "", flags: [], edited: true };
    lines.splice(place, 0, line);
    send();
    draw();
    find(rows, `#kl-prompt-${prompts().indexOf(line)}`).focus();
  }

  function remove(line) {
    const place = prompts().indexOf(line);
    lines.splice(lines.indexOf(line), 1);
    open = new Set([...open].filter((each) => each !== place).map((each) => (each > place ? each - 1 : each)));
    send();
    set(text);
    find(rows, `#kl-prompt-${Math.max(0, Math.min(place, prompts().length - 1))}`).focus();
  }

  function draw() {
    let place = 0;
    drawing = true;
    rows.replaceChildren(...lines.filter((line) => line.flags || line.raw.trim()).map((line) =>
      line.flags ? drawPrompt(line, place++) : make("p", { class: "kl-note kl-comment", text: line.raw.trim() })));
    drawing = false;
  }

  function drawPrompt(line, place) {
    const name = t`Prompt ${place + 1}`;
    const box = make("textarea", { id: `kl-prompt-${place}`, rows: "1", "aria-label": name, placeholder: t`What the preview shows`, spellcheck: "false" });
    box.value = line.prompt;
    box.addEventListener("input", () => {
      line.prompt = box.value;
      line.edited = true;
      send();
      if (/[\n\r]/.test(box.value)) reread();
    });
    const isMore = () => / --|^\s*#/.test(` ${box.value}`) || isFile(text);
    // A field that is taken off the page with the focus in it says `change` as well.
    box.addEventListener("change", () => !drawing && isMore() && reread());
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      let here = line;
      if (isMore()) {
        set(text);
        here = prompts()[Math.min(place, prompts().length - 1)];
      }
      if (!rows.hidden) insert(lines.indexOf(here) + 1);
    });
    const bin = make("button", { type: "button", class: "kl-quiet", text: t`Remove`, "aria-label": t`Remove prompt ${place + 1}`, onclick: () => remove(line) });
    const said = make("span", { class: "kl-facts" });
    const cells = make("div", { class: "kl-prompt-cells" });
    const say = () => (said.textContent = line.flags.map(({ name: flag, value }) => `--${flag} ${value}`).join(" "));
    const build = () => cells.replaceChildren(...drawCells(line, place, say));
    const more = make("details", { class: "kl-prompt-more", open: open.has(place) },
      make("summary", { onclick: () => more.open || build() }, make("span", { text: t`Negative, size, seed …` }), said), cells);
    more.addEventListener("toggle", () => (more.open ? open.add(place) : open.delete(place)));
    if (more.open) build();
    say();
    return make("div", { class: "kl-prompt", role: "group", "aria-label": name }, make("div", { class: "kl-prompt-line" }, box, bin), more);
  }

  // Drawn when they are opened: the grey defaults are then those of the other fields.
  function drawCells(line, place, say) {
    const usual = defaults(place);
    const shown = columns();
    const names = new Set(shown.map(({ flag }) => flag));
    const cells = shown.map(({ flag, label: title, wide, decimal, choices }) => {
      const ident = `kl-prompt-${place}-${flag}`;
      const value = (line.flags.find((item) => item.name === flag) || { value: "" }).value;
      const control = choices
        ? make("select", { id: ident }, ...["", ...choices, ...(value && !choices.includes(value) ? [value] : [])].map((choice) => make("option", { value: choice, text: choice || t`default` })))
        : make("input", { type: "text", id: ident, placeholder: usual[flag], inputmode: wide ? null : decimal ? "decimal" : "numeric", autocomplete: "off", spellcheck: "false" });
      control.value = value;
      control.addEventListener(choices ? "change" : "input", () => {
        setFlag(line, flag, strip(control.value));
        send();
        say();
      });
      if (wide) control.addEventListener("change", () => !drawing && control.value.includes(" --") && reread());
      return make("div", { class: wide ? "kl-prompt-cell kl-wide" : "kl-prompt-cell" }, make("label", { for: ident, text: title }), control);
    });
    const further = line.flags.filter((flag, index) => !names.has(flag.name) || line.flags.findIndex((each) => each.name === flag.name) !== index);
    if (further.length) {
      const ident = `kl-prompt-${place}-further`;
      const control = make("input", { type: "text", id: ident, autocomplete: "off", spellcheck: "false" });
      control.value = strip(written(further));
      control.addEventListener("input", () => {
        setFurther(line, names, control.value);
        send();
        say();
      });
      cells.push(make("div", { class: "kl-prompt-cell kl-wide" }, make("label", { for: ident, text: t`Further flags, kept as they are` }), control));
    }
    return cells;
  }

  return {
    set: (next) => (next !== text || !rows.firstChild) && set(next),
    focus: () => (node.hidden ? rows.querySelector("textarea") : node).focus({ preventScroll: true }),
    marked: rows,
    spec,
  };
}
