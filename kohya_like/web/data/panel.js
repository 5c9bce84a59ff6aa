// One image beside the grid: large, with the frame that training cuts, its caption to edit, and the texts that training will show.

import { joined, t } from "../common/language.js";
import { make, say } from "../common/page.js";
import { stored, store } from "../common/stored.js";
import { grouped, plural } from "../common/words.js";
import { aboutTokens } from "./tokens.js";

const WEIGHT = "kl.data.weight";

export function makePanel(desk, { changed, step, leaveOut, findMask }) {
  const picture = make("img", { alt: "" });
  const frame = make("span", { class: "kl-data-frame" });
  const weight = make("img", { class: "kl-data-weight", alt: "", hidden: true });
  const stage = make("div", { class: "kl-data-large" }, picture, weight, frame);
  const weighs = make("input", { type: "checkbox", id: "kl-data-weighs" });
  const mask = make("button", { type: "button", class: "kl-button", text: t`Mask`, "aria-label": t`Edit the loss mask`, onclick: () => openEditor() });
  const masked = make("p", { class: "kl-note", role: "status" });
  const masks = make("div", { class: "kl-row" }, mask, make("label", { class: "kl-toggle", for: "kl-data-weighs" }, weighs, make("span", { text: t`Show the weight in the loss` })));
  const befores = make("div", { class: "kl-data-befores", hidden: true });
  const after = make("p", { class: "kl-note", text: t`After`, hidden: true });
  const pair = make("div", { class: "kl-data-pair" }, befores, make("div", {}, after, stage));
  const facts = make("p", { class: "kl-note" });
  const label = make("label", { for: "kl-data-text", text: t`Caption` });
  const text = make("textarea", { id: "kl-data-text", rows: "5", spellcheck: "true", "aria-describedby": "kl-data-told" });
  const told = make("p", { class: "kl-help", id: "kl-data-told", role: "status" });
  const conflict = make("div", { class: "kl-data-conflict", role: "alert", hidden: true });
  const shown = make("div", { class: "kl-data-shown" });
  const button = (words, act) => make("button", { type: "button", class: "kl-button", text: words, onclick: act });
  const save = make("button", { type: "button", class: "kl-button kl-strong", text: t`Save caption`, onclick: () => write() });
  const inside = make("div", { hidden: true }, pair, facts, masks, masked, label, text, told, conflict,
    make("div", { class: "kl-row" }, save, button(t`Previous`, () => step(-1)), button(t`Next`, () => step(1)), button(t`Leave out`, () => leaveOut([index]))), shown);
  const none = make("p", { class: "kl-note", text: t`Choose an image to see it large and to write its caption.` });
  const root = make("section", { class: "kl-card kl-data-panel", "aria-label": t`The chosen image` }, none, inside);
  let index = -1;
  let read = { text: "", version: "none" };
  let kept = ""; // the words that are on the disk, as far as known here

  const isChanged = () => index >= 0 && text.value.trim() !== kept;
  const tell = (words = "") => {
    const tokens = aboutTokens(text.value);
    const cut = desk.known.length && tokens > desk.known.length ? t`; the model reads ${desk.known.length}, the end may be cut off` : "";
    say(told, joined([words || (isChanged() ? t`Not saved yet.` : ""), t`About ${plural(tokens, "token", "tokens")}${cut}.`]));
  };
  text.addEventListener("input", () => tell());
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    write();
  });
  const isFixed = () => Boolean(desk.known.fixed || desk.known.items[index]?.outside);
  text.addEventListener("change", () => isChanged() && !isFixed() && write());

  async function show(next) {
    // What was typed for the one before is saved first.
    if (isChanged() && !isFixed() && !(await write())) return;
    index = next;
    // Nothing can be typed over the words of the one before, nor before those of this one are here.
    text.readOnly = true;
    text.value = kept = "";
    const item = desk.known.items[index];
    none.hidden = true;
    inside.hidden = false;
    conflict.hidden = true;
    picture.src = `${desk.image(index)}&large`;
    picture.alt = item.name;
    showBefores(item);
    stage.style.maxWidth = `${item.size[0]}px`;
    stage.style.setProperty("--kl-ratio", String(item.size[0] / item.size[1]));
    const [left, top, width, height] = item.frame.map((share) => `${(100 * share).toFixed(2)}%`);
    weight.style.cssText = frame.style.cssText = `left:${left};top:${top};width:${width};height:${height}`;
    showFacts();
    mask.disabled = Boolean(desk.known.noMasks || item.outside);
    text.disabled = save.disabled = isFixed();
    weigh();
    await renew();
  }

  // The mask as training reads it, over what training cuts.
  weighs.checked = stored(WEIGHT) === true;
  weighs.addEventListener("change", () => {
    store(WEIGHT, weighs.checked);
    weigh();
  });
  async function weigh() {
    const now = index;
    weight.hidden = true;
    say(masked, "");
    if (!weighs.checked || now < 0) return;
    const answer = await desk.order("weight", { index: now });
    if (now !== index || answer.problem) return;
    weight.src = `data:image/png;base64,${answer.picture}`;
    weight.hidden = false;
    const cells = answer.side > 1 ? t`Its squares are the latents, of ${answer.side} x ${answer.side} pixels, that training weighs.` : "";
    say(masked, answer.isRead ? `${t`Weight in the loss from ${grouped(answer.lowest, 2)} to ${grouped(answer.highest, 2)}, ${grouped(answer.mean, 2)} in the mean; tinted is what counts less.`} ${cells}` : t`Masked loss is off on the Train tab, so all of the image counts.`);
  }

  async function openEditor() {
    const now = index;
    const { openMask } = await import("./mask.js");
    await openMask(desk, now, { changed: (state) => {
      desk.known.items[now].mask = state.there;
      changed(now);
      if (now === index) showFacts();
      weigh();
    }, find: (texts) => findMask(now, texts) });
  }

  function showFacts() {
    const item = desk.known.items[index];
    const share = Math.round(100 * (1 - item.frame[2] * item.frame[3]));
    say(facts, [`${item.name}: ${item.size.join(" x ")}`, t`trained at ${item.bucket.join(" x ")}`, share > 0 ? t`${share} % cut off${desk.known.random ? t`, each time elsewhere` : ""}` : t`nothing cut off`,
      item.repeats > 1 ? t`${item.repeats} times an epoch` : "", item.controls.length ? t`edit of ${plural(item.controls.length, "image", "images")}` : "",
      item.mask ? (desk.known.masksAreRead ? t`with a mask` : t`with a mask that is not read: masked loss is off`) : "", item.outside ? t`in another folder: open that to write its caption` : "", ...desk.findings(index)].filter(Boolean).join(" · "));
  }

  // An edit stands beside what it is an edit of, and its caption is the instruction.
  function showBefores(item) {
    const isEdit = item.controls.length > 0;
    befores.hidden = after.hidden = !isEdit;
    label.textContent = isEdit ? t`Instruction` : t`Caption`;
    pair.classList.toggle("kl-data-edit", isEdit);
    befores.replaceChildren(...item.controls.flatMap(([width, height], place) => {
      const words = item.controls.length > 1 ? t`Before, image ${place + 1}` : t`Before`;
      const node = make("div", { class: "kl-data-large" }, make("img", { src: `${desk.image(index)}&large&control=${place}`, alt: `${words}: ${width} x ${height}` }));
      node.style.maxWidth = `${width}px`;
      node.style.setProperty("--kl-ratio", String(width / height));
      return [make("p", { class: "kl-note", text: words }), node];
    }));
  }

  async function renew() {
    if (index < 0) return;
    const now = index;
    const answer = await desk.order("image", { index: now });
    if (now !== index) return;
    if (answer.problem && text.readOnly) say(told, t`The caption could not be read. Choose the image again.`);
    // What is being typed stays; saving it asks, since what it was typed over is not there any more.
    if (!answer.problem && !isChanged()) take(answer, text.value);
  }

  // What lies on the disk now, and what training makes of it. What was typed since `asked` stays.
  function take(answer, asked, words = "") {
    read = answer;
    kept = (answer.text ?? "").trim();
    if (text.value === asked) text.value = answer.text ?? "";
    text.readOnly = false;
    showFacts();
    text.placeholder = answer.text === null && desk.texts[index] ? t`${desk.texts[index]} (what training reads without a caption file)` : "";
    shown.replaceChildren(make("h3", { text: t`As training shows it` }), ...answer.shown.map((each) => make("p", { text: each || t`(an empty text)` })));
    tell(isChanged() ? "" : words);
  }

  // Leaving the field and pressing the button come at once: one after the other, and what is saved already is not saved again.
  let saving = Promise.resolve(true);
  const write = (version) => (saving = saving.then(() => {
    if (isChanged()) return put(version);
    tell(t`Saved.`);
    return true;
  }));

  async function put(version = read.version) {
    const now = index;
    const words = text.value;
    const answer = await desk.order("caption", { index: now, text: words, version });
    if (answer.problem) return false;
    if (answer.conflict) {
      ask(answer.conflict, words);
      return false;
    }
    conflict.hidden = true;
    desk.texts[now] = words.trim();
    changed(now);
    if (now === index) take(answer, words, t`Saved.`);
    return true;
  }

  // Somebody else has written meanwhile: nothing is lost, and who is here chooses.
  function ask(there, words) {
    conflict.hidden = false;
    conflict.replaceChildren(make("p", { text: t`Another page has changed this caption meanwhile. It says now:` }), make("blockquote", { text: there.text ?? t`(there is no caption file any more)` }),
      make("div", { class: "kl-row" }, button(t`Keep mine`, () => {
        text.value = words;
        write(there.version);
      }), button(t`Take theirs`, async () => {
        conflict.hidden = true;
        kept = text.value.trim();
        desk.texts[index] = there.text ?? "";
        changed(index);
        await renew();
      })));
    tell(t`Not saved.`);
  }

  return {
    root, show, index: () => index,
    async renew() {
      if (index >= 0) showFacts();
      await Promise.all([renew(), weigh()]);
    },
    clear() {
      index = -1;
      kept = text.value.trim();
      none.hidden = false;
      inside.hidden = true;
    },
  };
}
