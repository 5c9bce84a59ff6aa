// The Data tab: the images of the form's data set, as training will cut and tell them. Talks with kohya_like/data_room/routes.py, and asks
// nothing before the tab is seen.

import { t, translated } from "../common/language.js";
import { makeMenu } from "../common/menu.js";
import { bring, find, make, say } from "../common/page.js";
import { makeBar } from "../common/progress.js";
import { eachLine, headers, post, withToken } from "../common/studio.js";
import { plural } from "../common/words.js";
import { addImages, chooseImages } from "../train/form.js";
import { values } from "../train/settings.js";
import { makeGrid } from "./grid.js";
import { makePanel } from "./panel.js";
import { rewrite } from "./rewrite.js";
import { tags } from "./tags.js";
import { proposals } from "./triage.js";
import { aboutTokens } from "./tokens.js";
import { makeWork, openWork } from "./work.js";

const KIND_WORDS = { regularisation: t`regularisation`, "held out": t`held out` };

const isNarrow = matchMedia("(max-width: 999px)"); // the chosen image lies below the others

export async function data({ root }) {
  const desk = { known: null, texts: [], marked: new Map(), faces: new Map(), alike: [] };
  const status = make("p", { class: "kl-status", role: "status" });
  const wrong = make("div", { class: "kl-error", role: "alert", hidden: true });
  const bar = makeBar(t`Progress`);
  const search = make("input", { type: "search", id: "kl-data-search", placeholder: t`Find in captions and names`, "aria-label": t`Find in captions and names`, autocomplete: "off" });
  const only = make("select", { id: "kl-data-only", "aria-label": t`Which images` });
  const count = make("p", { class: "kl-note", role: "status" });
  const notes = make("details", { class: "kl-fold", hidden: true });
  const button = (text, act) => make("button", { type: "button", class: "kl-button", text, disabled: true, onclick: act });
  const choosing = () => make("button", { type: "button", class: "kl-button", text: t`Open a folder`, onclick: () => chooseImages(open) });
  const other = choosing();
  const opening = () => make("button", { type: "button", class: "kl-button", text: t`Open again`, onclick: () => open() });
  const looks = {
    faces: button(t`Find faces cut off`, () => openWork(desk, "faces", shownIndices(), (row) => work.show(row))),
    alike: button(t`Find near duplicates with a model`, () => openWork(desk, "duplicates", shownIndices(), (row) => work.show(row))),
    undo: button(t`Undo`, undo),
    masks: button(t`Make masks`, () => openWork(desk, "mask", shownIndices(), (row) => work.show(row))),
    tags: button(t`Tags`, () => tags(desk, (tag) => { search.value = tag; sift(); })),
    proposals: button(t`Find duplicates and blur`, () => proposals(desk, bar, status, { mark, leaveOut })),
  };
  const orders = [
    looks.undo,
    button(t`Write captions`, () => openWork(desk, "caption", shownIndices(), (row) => work.show(row))),
    looks.masks,
    looks.tags,
    button(t`Search and replace`, () => rewrite(desk, shownIndices(), after)),
    looks.proposals,
    looks.faces,
    looks.alike,
  ];
  const rare = makeMenu(t`More`, looks.proposals, looks.faces, looks.alike, other, opening());
  const back = make("button", { type: "button", class: "kl-button", hidden: true, onclick: bringBack });
  const grid = makeGrid({ label: t`Images`, cell, choose: (index) => panel.show(index), pressed: () => isNarrow.matches && bring(panel.root) });
  const work = makeWork(desk, after);
  const findMask = (index, texts) => openWork(desk, "mask", [index], (row) => work.show(row), texts);
  const panel = makePanel(desk, { changed: (index) => grid.redraw([index]), step: (by) => grid.step(by), leaveOut, findMask });
  const empty = make("div", { class: "kl-data-empty", hidden: true });
  bar.root.hidden = true;
  root.append(make("div", { class: "kl-card kl-data-top" },
    make("div", { class: "kl-row" }, search, only, ...orders.filter((order) => !rare.contains(order)), back, rare), bar.root, status, wrong, count, notes),
  work.root, empty, make("div", { class: "kl-data-columns" }, grid.root, panel.root));

  const image = (index) => withToken(`/kl/data/image/${desk.known.room}/${index}`);
  desk.image = image;
  desk.order = async (what, order) => {
    const answer = await post(`/kl/data/${what}`, { room: desk.known.room, ...order }).catch((error) => ({ problem: t`The studio does not answer: ${error.message}` }));
    fail(answer.problem ? [answer.problem] : []);
    return answer;
  };

  function fail(sentences) {
    wrong.replaceChildren(...sentences.map((text) => make("p", { text: translated(text) })));
    wrong.hidden = !sentences.length;
  }

  // What is worth a look at an image, in a word each.
  function findings(index) {
    const item = desk.known.items[index];
    const tokens = aboutTokens(desk.texts[index]);
    return [KIND_WORDS[item.kind] || "", desk.texts[index].trim() ? "" : t`no caption`, item.small ? t`small` : "", item.enlarged ? t`enlarged` : "",
      desk.known.length && tokens > desk.known.length ? t`long caption` : "", desk.faces.get(index) || "", isAlike(index) ? t`alike for the model` : "", desk.marked.get(index) || ""].filter(Boolean);
  }
  desk.findings = findings;
  // The first of a group is the one to keep.
  const isAlike = (index) => desk.alike.some(([, ...others]) => others.some(([each]) => each === index));

  function cell(index) {
    const item = desk.known.items[index];
    const [left, top, width, height] = item.frame.map((share) => `${(100 * share).toFixed(2)}%`);
    const [w, h] = item.size;
    const scale = Math.min(1, 140 / Math.max(w, h)); // nothing is blown up
    const frame = item.frame[2] < 0.995 || item.frame[3] < 0.995 ? make("span", { class: "kl-data-frame" }) : null;
    if (frame) frame.style.cssText = `left:${left};top:${top};width:${width};height:${height}`;
    const picture = make("span", { class: "kl-data-picture" }, make("img", { src: image(index), alt: "", loading: "lazy", decoding: "async" }), frame);
    picture.style.cssText = `width:${Math.round(w * scale)}px;height:${Math.round(h * scale)}px`;
    const marks = [`${item.bucket.join(" x ")}${item.repeats > 1 ? ` · ${t`${item.repeats} times`}` : ""}`, ...findings(index)].join(" · ");
    return make("div", { class: "kl-data-inside" }, make("span", { class: "kl-data-stage" }, picture),
      make("span", { class: "kl-data-name", text: item.name }),
      make("span", { class: "kl-data-caption", text: desk.texts[index] || t`(no caption)` }),
      make("span", { class: "kl-data-marks", text: marks, title: marks }));
  }

  const KINDS = {
    all: [t`All images`, () => true],
    bare: [t`Without a caption`, (index) => !desk.texts[index].trim()],
    found: [t`With something to look at`, (index) => findings(index).length > 0],
    faces: [t`With a face cut off`, (index) => desk.faces.has(index)],
    unmasked: [t`Without a mask`, (index) => !desk.known.items[index].mask],
    cut: [t`Cut by more than a tenth`, (index) => desk.known.items[index].frame[2] * desk.known.items[index].frame[3] < 0.9],
  };

  function shownIndices() {
    const words = search.value.toLowerCase().trim();
    const fits = KINDS[only.value][1];
    return desk.known.items.flatMap((item, index) => (fits(index) && (!words || `${item.name}\n${desk.texts[index]}`.toLowerCase().includes(words)) ? [index] : []));
  }

  function sift() {
    if (!desk.known) return;
    const indices = shownIndices();
    say(count, `${indices.length === desk.known.items.length ? plural(indices.length, "image", "images") : t`${indices.length} of ${desk.known.items.length} images`} · ${desk.known.folder}${desk.known.fixed ? `. ${translated(desk.known.fixed)}` : ""}`);
    grid.show(indices, panel.index());
  }
  only.append(...Object.entries(KINDS).map(([value, [text]]) => make("option", { value, text })));
  search.addEventListener("input", sift);
  only.addEventListener("change", sift);

  // Captions and masks were written, here or by an order: {index: text}, {index: whether there is a mask}.
  function after(texts, masks = {}) {
    for (const [index, isThere] of Object.entries(masks)) desk.known.items[Number(index)].mask = isThere;
    for (const [index, text] of Object.entries(texts)) desk.texts[Number(index)] = text;
    sift();
    grid.redraw();
    panel.renew();
  }

  async function undo() {
    const answer = await desk.order("undo", {});
    if (answer.problem) return;
    say(status, answer.what ? t`Taken back: ${translated(answer.what)} (${answer.of === "masks" ? plural(answer.count, "mask", "masks") : plural(answer.count, "caption", "captions")}${answer.others ? t`; ${answer.others} were changed since and stay` : ""}).` : t`There is nothing to take back.`);
    after(answer.texts || {}, answer.masks);
  }

  function mark(found) {
    desk.marked = found;
    grid.redraw();
  }

  async function leaveOut(indices) {
    const answer = await desk.order("leave_out", { indices });
    if (answer.problem) return false;
    await open(t`Left out: ${plural(answer.count, "image", "images")}, moved to the hidden folder .left_out. Bring back undoes it.`);
    return true;
  }

  async function bringBack() {
    const answer = await desk.order("bring_back", {});
    if (!answer.problem) await open(t`Brought back: ${plural(answer.count, "image", "images")}.`);
  }

  let opened = "";
  let busy = false;
  async function open(told = "") {
    if (busy) return;
    busy = true;
    const form = values();
    opened = settingsOf(form);
    fail([]);
    say(status, t`Looking at the images …`);
    const items = [];
    let last = { problems: [{ option: "", message: t`The studio went away before it had an answer.` }] };
    try {
      await eachLine(await fetch("/kl/data/open", { method: "POST", headers: headers(), body: JSON.stringify({ form }) }), (said) => {
        last = said;
        items.push(...(said.items || []));
        if (said.say) say(status, translated(said.say));
      });
    } catch (error) {
      last = { problems: [{ option: "", message: error.message }] };
    }
    busy = false;
    say(status, told);
    const has = Boolean(last.room);
    desk.known = has ? { ...last, items } : null;
    desk.marked = new Map();
    desk.faces = new Map();
    desk.alike = [];
    desk.texts = has ? items.map((item) => item.caption) : [];
    for (const each of orders) each.disabled = !has || Boolean(each === looks.masks ? last.noMasks : each === looks.undo ? last.fixed && last.noMasks : last.fixed && ![looks.tags, looks.proposals, looks.faces, looks.alike].includes(each));
    panel.clear();
    back.hidden = !has || !last.leftOut;
    back.textContent = t`Bring back what was left out`;
    find(root, ".kl-data-columns").hidden = !has;
    find(root, ".kl-data-top").classList.toggle("kl-card", has); // an empty card is none
    for (const each of [search, only, rare, count, ...orders]) each.hidden = !has;
    empty.hidden = has;
    if (!has) {
      const about = last.problems.filter(({ option }) => option === "train_data_dir");
      const missing = about.length > 0 && !values().values.train_data_dir;
      fail(missing ? [] : last.problems.map(({ message }) => message));
      empty.replaceChildren(make("p", { text: missing ? t`Here you see the images of the form's data set: cut as training cuts them, with their captions to edit. There are none yet.` : t`The data set cannot be shown before this is put right on the Train tab.` }),
        make("div", { class: "kl-row" }, make("button", { type: "button", class: "kl-button kl-strong", text: t`Add images`, onclick: () => addImages() }), choosing(), missing ? null : opening()));
      return;
    }
    const remarks = [...last.notes.map(translated), ...last.bad.map((text) => t`Cannot be used: ${translated(text)}`)];
    notes.hidden = !remarks.length;
    // A run does not start with them.
    notes.open = last.bad.length > 0;
    notes.replaceChildren(make("summary", {}, make("span", { text: plural(remarks.length, "finding", "findings") })), make("ul", { class: "kl-plain" }, ...remarks.map((text) => make("li", { text }))));
    sift();
    if (told) bring(status);
    await work.look();
  }

  // Opened when it is seen, and again when the form has other images or sizes.
  const settingsOf = (form) => JSON.stringify(form);
  new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && opened !== settingsOf(values()) && open()).observe(find(root, ".kl-data-top"));
}
