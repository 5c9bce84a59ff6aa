// A loss mask, drawn on its image with mouse, finger or keys. What is painted counts; what is tinted counts less. Also the place where
// somebody shows SAM the object, with points and a box. Talks with kohya_like/data_room/masks.py.

import { makeChoice } from "../common/field.js";
import { joined, t, translated } from "../common/language.js";
import { make, say, sharp } from "../common/page.js";
import { headers, withToken } from "../common/studio.js";
import { openDialog } from "../picking/dialog.js";
import { asGrey, drawMask, drawStep, makeStrokes } from "./strokes.js";

const LONGEST_SIDE = 2048; // as in data_room/masks.py
const share = (number) => String(Math.round(number * 1000) / 1000);

/**
 * @param {any} desk
 * @param {number} index of the image
 * @param {{changed: (state: any) => void, find: (texts: Record<string, string | boolean>) => void}} hear changed is told of a mask that was
 *   written, find of points and a box for a model
 */
export async function openMask(desk, index, { changed, find }) {
  const item = desk.known.items[index];
  const scale = Math.min(1, LONGEST_SIDE / Math.max(...item.size));
  const [width, height] = item.size.map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = make("canvas", { class: "kl-mask-canvas", width, height, tabindex: "0", role: "application", "aria-label": t`Mask of ${item.name}`, "aria-describedby": "kl-mask-keys" });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const cursor = make("span", { class: "kl-mask-cursor", hidden: true });
  const asked = make("div", { class: "kl-mask-asked" });
  const picture = make("img", { alt: item.name });
  const stage = make("div", { class: "kl-mask-stage" }, picture, canvas, asked, cursor);
  stage.style.setProperty("--kl-ratio", String(width / height));
  const status = make("p", { class: "kl-status", role: "status" });
  const wrong = make("div", { class: "kl-error", role: "alert", hidden: true });
  const size = make("input", { type: "range", id: "kl-mask-size", min: "1", max: "40", value: "8" });
  const choice = makeChoice(t`Tool`, "kl-mask-tool", [["paint", t`Paint`], ["erase", t`Erase`], ["point", t`Include point`], ["beside", t`Exclude point`], ["box", t`Box`]], (value) => pick(value));
  const button = (text, act, label) => make("button", { type: "button", class: "kl-button", text, "aria-label": label, onclick: act });
  const undo = button(t`Undo`, () => back(), t`Undo the last stroke`);
  const redo = button(t`Redo`, () => forth(), t`Redo the stroke`);
  const save = make("button", { type: "button", class: "kl-button kl-strong", text: t`Save mask`, onclick: () => keep() });
  const remove = button(t`Remove mask`, () => put(null));
  const ask = button(t`Segment with a model …`, () => search());
  const close = button(t`Close`, () => leave(), t`Close the mask`);
  const dialog = openDialog(t`Loss mask`,
    make("p", { class: "kl-note", text: t`What you paint counts in the loss; what is tinted counts less, or not at all.` }), stage,
    make("p", { class: "kl-help", id: "kl-mask-keys", text: t`With keys: arrows move the brush, Space paints, Shift with arrows draws, [ and ] change its size, P and E paint and erase, Ctrl+Z takes back.` }),
    choice.root, make("div", { class: "kl-row" }, make("label", { for: "kl-mask-size", text: t`Brush size` }), size, undo, redo),
    make("div", { class: "kl-row" }, button(t`Fill`, () => act({ kind: "all" })), button(t`Clear`, () => act({ kind: "nothing" })), button(t`Invert`, () => act({ kind: "invert" }), t`Invert the mask`), ask),
    status, wrong, make("div", { class: "kl-row" }, save, remove, close));
  dialog.classList.add("kl-mask");
  sharp(picture, stage).src = `${desk.image(index)}&large`;
  const strokes = makeStrokes();
  let tool = "paint";
  let before = null; // the mask that the editor began with
  let version = "none";
  let at = [width / 2, height / 2]; // of the brush that keys move
  const points = []; // [x, y, whether on the object], as shares
  let box = null; // left, top, right, bottom, as shares
  let warned = false;
  let keyed = null; // the stroke that Shift with arrows draws
  choice.radios.get("paint").checked = true;

  const brush = () => (Number(size.value) / 100) * Math.max(width, height);
  const isDrawing = () => tool === "paint" || tool === "erase";
  const tell = (text) => say(status, text);
  const fail = (text) => {
    wrong.hidden = !text;
    say(wrong, text || "");
  };

  function turn() {
    undo.disabled = !strokes.canUndo();
    redo.disabled = !strokes.canRedo();
    save.disabled = strokes.isSaved();
    ask.disabled = !points.some(([, , isOn]) => isOn) && !box;
    warned = false;
  }

  function pick(value) {
    tool = value;
    choice.radios.get(value).checked = true;
    canvas.style.cursor = isDrawing() ? "none" : "crosshair";
    showCursor();
  }

  function redraw() {
    drawMask(context, before);
    for (const step of strokes.steps()) drawStep(context, step);
    turn();
  }

  function act(step) {
    drawStep(context, strokes.add(step));
    turn();
    tell(t`Not saved yet.`);
  }

  const back = () => {
    keyed = null;
    if (strokes.undo()) redraw();
  };
  const forth = () => {
    if (strokes.redo()) redraw();
  };

  // The pointer, from the screen to the mask's pixels.
  function placeOf(event) {
    const seen = canvas.getBoundingClientRect();
    return [((event.clientX - seen.left) / seen.width) * width, ((event.clientY - seen.top) / seen.height) * height];
  }

  function showCursor() {
    const seen = (100 * brush()) / width;
    cursor.style.cssText = `left:${(100 * at[0]) / width}%;top:${(100 * at[1]) / height}%;width:${isDrawing() ? seen : 2}%`;
  }

  let drawing = null; // the step under the pointer, or the corner where a box began
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || drawing) return;
    event.preventDefault();
    canvas.focus();
    canvas.setPointerCapture(event.pointerId);
    at = placeOf(event);
    if (tool === "box") {
      drawing = { corner: at };
    } else if (isDrawing()) {
      drawing = strokes.add({ kind: "stroke", counts: tool === "paint", size: brush(), points: [at] });
      drawStep(context, drawing);
    } else {
      point(at);
    }
  });
  canvas.addEventListener("pointermove", (event) => {
    cursor.hidden = false;
    const told = event.getCoalescedEvents ? event.getCoalescedEvents() : [];
    for (const each of told.length ? told : [event]) {
      at = placeOf(each);
      if (!drawing || drawing.corner) continue;
      drawing.points.push(at);
      drawStep(context, drawing, drawing.points.length - 1);
    }
    if (drawing && drawing.corner) frame(drawing.corner, at);
    showCursor();
  });
  const end = () => {
    if (drawing && !drawing.corner) tell(t`Not saved yet.`);
    drawing = null;
    turn();
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("pointerleave", () => (cursor.hidden = document.activeElement !== canvas));
  canvas.addEventListener("focus", () => (cursor.hidden = false));
  canvas.addEventListener("blur", () => (cursor.hidden = true));
  size.addEventListener("input", showCursor);

  function point(place) {
    points.push([place[0] / width, place[1] / height, tool === "point"]);
    showAsked();
  }

  function frame(one, other) {
    const inside = (number, most) => Math.min(1, Math.max(0, number / most));
    const across = [inside(one[0], width), inside(other[0], width)].sort((a, b) => a - b);
    const down = [inside(one[1], height), inside(other[1], height)].sort((a, b) => a - b);
    box = across[1] - across[0] > 0.005 && down[1] - down[0] > 0.005 ? [across[0], down[0], across[1], down[1]] : null;
    showAsked();
  }

  function showAsked() {
    const frames = box ? [make("span", { class: "kl-mask-box" })] : [];
    if (box) frames[0].style.cssText = `left:${100 * box[0]}%;top:${100 * box[1]}%;width:${100 * (box[2] - box[0])}%;height:${100 * (box[3] - box[1])}%`;
    asked.replaceChildren(...frames, ...points.map(([x, y, isOn]) => {
      const node = make("span", { class: isOn ? "kl-mask-point" : "kl-mask-point kl-mask-beside", text: isOn ? "+" : "−" });
      node.style.cssText = `left:${100 * x}%;top:${100 * y}%`;
      return node;
    }));
    turn();
    tell(t`${points.length} points${box ? t`, and a box` : ""}. Next: Segment with a model.`);
  }

  const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  canvas.addEventListener("keyup", (event) => event.key === "Shift" && (keyed = null));
  canvas.addEventListener("keydown", (event) => {
    const known = key(event);
    if (!known) return;
    event.preventDefault();
    showCursor();
  });

  function key(event) {
    if (event.ctrlKey || event.metaKey) {
      if (event.key.toLowerCase() !== "z" && event.key.toLowerCase() !== "y") return false;
      if (event.key.toLowerCase() === "y" || event.shiftKey) forth();
      else back();
      return true;
    }
    if (event.key in MOVES) {
      const step = Math.max(1, brush() / 2);
      const [across, down] = MOVES[event.key];
      const from = at;
      at = [Math.min(width, Math.max(0, at[0] + across * step)), Math.min(height, Math.max(0, at[1] + down * step))];
      if (event.shiftKey && isDrawing()) stretch(from);
      else keyed = null;
      return true;
    }
    if (event.key === "[" || event.key === "]") {
      size.value = String(Number(size.value) + (event.key === "]" ? 1 : -1));
      return true;
    }
    if (event.key === " ") {
      if (isDrawing()) act({ kind: "stroke", counts: tool === "paint", size: brush(), points: [at] });
      else if (tool !== "box") point(at);
      return true;
    }
    const chosen = { p: "paint", e: "erase" }[event.key.toLowerCase()];
    if (chosen) pick(chosen);
    return Boolean(chosen);
  }

  function stretch(from) {
    keyed = keyed || strokes.add({ kind: "stroke", counts: tool === "paint", size: brush(), points: [from] });
    keyed.points.push(at);
    drawStep(context, keyed, keyed.points.length - 1);
    turn();
    tell(t`Not saved yet.`);
  }

  async function load() {
    const answer = await desk.order("image", { index });
    if (answer.problem || answer.mask.why) {
      fail(translated(answer.problem || answer.mask.why));
      for (const each of [save, remove, ask]) each.disabled = true;
      return;
    }
    version = answer.mask.version;
    remove.disabled = !answer.mask.there;
    const response = await fetch(withToken(`/kl/data/mask/${desk.known.room}/${index}`), { headers: headers(), cache: "no-store" });
    if (response.status === 200) before = await createImageBitmap(await response.blob());
    else if (response.status !== 204) fail(translated((await response.json()).problem || ""));
    strokes.clear();
    redraw();
    tell(answer.mask.there ? t`The mask ${answer.mask.file}.` : before ? t`No mask yet; this is the alpha channel of the image.` : t`No mask yet: all of the image counts until one is saved.`);
  }

  async function keep() {
    const sheet = make("canvas", { width, height });
    const copy = sheet.getContext("2d");
    const pixels = context.getImageData(0, 0, width, height);
    asGrey(pixels.data);
    copy.putImageData(pixels, 0, 0);
    await put(sheet.toDataURL("image/png").split(",")[1]);
  }

  async function put(picture, known = version) {
    fail("");
    const answer = await desk.order("mask", { index, picture, version: known });
    if (answer.problem) {
      fail(translated(answer.problem));
      return;
    }
    if (answer.conflict) {
      conflict(picture, answer.conflict);
      return;
    }
    version = answer.mask.version;
    remove.disabled = !answer.mask.there;
    changed(answer.mask);
    if (picture === null) {
      before = null;
      strokes.clear();
      redraw();
    } else {
      strokes.save();
    }
    turn();
    const saved = [t`Saved in ${answer.mask.file}.`, desk.known.masksAreRead ? "" : t`Masked loss is off on the Train tab, so all of the image counts.`];
    tell(answer.mask.there ? joined(saved) : t`The mask is removed; Undo on the Data tab brings it back.`);
  }

  // Somebody else has written meanwhile: nothing is lost, and who is here chooses.
  function conflict(picture, there) {
    wrong.hidden = false;
    wrong.replaceChildren(make("p", { text: t`Another page has changed this mask meanwhile.` }), make("div", { class: "kl-row" },
      button(t`Keep mine`, () => put(picture, there.version)), button(t`Take theirs`, () => {
        fail("");
        before = null;
        load();
      })));
    tell(t`Not saved.`);
  }

  function search() {
    const texts = { mask_points: points.map(([x, y, isOn]) => `${isOn ? "" : "-"}${share(x)}:${share(y)}`).join("\n"), mask_box: box ? box.map(share).join(":") : "", overwrite: true };
    if (!strokes.isSaved() && !leaves()) return;
    dialog.close();
    find(texts);
  }

  // What is drawn and not saved is never lost by one key.
  function leaves() {
    if (strokes.isSaved() || warned) return true;
    warned = true;
    fail(t`What you have drawn is not saved. Save it, or press again to leave it.`);
    return false;
  }

  const leave = () => leaves() && dialog.close();
  dialog.addEventListener("cancel", (event) => {
    if (!leaves()) event.preventDefault();
  });

  pick("paint");
  turn();
  await load();
}
