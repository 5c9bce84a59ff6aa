// Duplicates, blurred images and shared watermarks, as proposals: nothing is left out that nobody has ticked.

import { t, translated } from "../common/language.js";
import { make, say } from "../common/page.js";
import { eachLine, headers } from "../common/studio.js";
import { plural } from "../common/words.js";
import { openDialog } from "../picking/dialog.js";

const SHOWN_GROUPS = 200;

export async function proposals(desk, bar, status, { mark, leaveOut }) {
  /** @type {any} */
  let last = { problem: t`The studio went away before it had looked at all.` };
  bar.root.hidden = false;
  try {
    await eachLine(await fetch("/kl/data/triage", { method: "POST", headers: headers(), body: JSON.stringify({ room: desk.known.room }) }), (said) => {
      last = said;
      if (said.of) bar.show(said.done / said.of);
      if (said.of) say(status, t`Comparing: ${said.done} of ${said.of} images …`);
    });
  } catch (error) {
    last = { problem: error.message };
  }
  bar.root.hidden = true;
  say(status, translated(last.problem || ""));
  if (last.problem) return;
  const small = desk.known.items.flatMap((item, index) => (item.small ? [index] : []));
  const marks = new Map();
  const watermarks = last.watermarks.flatMap(({ images }) => images);
  for (const [word, groups] of [[t`watermark`, [[-1, ...watermarks]]], [t`framed`, [[-1, ...last.framed]]], [t`blurred`, [[-1, ...last.blurred]]], [t`nearly the same`, last.near], [t`the same file`, last.same]]) {
    for (const [, ...others] of groups) for (const index of others) marks.set(index, word);
  }
  mark(marks);
  show(last, small);

  // What pixels tell already is not told again.
  function alike({ same, near }) {
    return desk.alike.filter((group) => ![...same, ...near].some((known) => group.every(([index]) => known.includes(index))));
  }

  function show({ same, near, leaks, blurred, framed, unreadable, watermarks: shared }, tiny) {
    const likes = alike({ same, near });
    const distances = new Map(likes.flatMap(([, ...others]) => others));
    const ticked = new Set();
    const go = make("button", { type: "button", class: "kl-button kl-strong", text: t`Leave out`, disabled: true, onclick: async () => {
      dialog.close();
      await leaveOut([...ticked]);
    } });
    const close = make("button", { type: "button", class: "kl-button", text: t`Close`, "aria-label": t`Close the proposals`, onclick: () => dialog.close() });
    const tick = (index, isOn) => {
      if (isOn) ticked.add(index);
      else ticked.delete(index);
      go.disabled = !ticked.size;
      go.textContent = ticked.size ? t`Leave out ${plural(ticked.size, "image", "images")}` : t`Leave out`;
    };
    const choice = (index, isProposed, kind) => {
      const box = make("input", { type: "checkbox", id: `kl-data-${kind}-${index}`, checked: isProposed });
      const item = desk.known.items[index];
      box.addEventListener("change", () => tick(index, box.checked));
      if (isProposed) tick(index, true);
      return make("label", { class: "kl-data-choice", for: box.id }, make("img", { src: desk.image(index), alt: "", loading: "lazy" }), make("span", { text: [item.name, item.size.join(" x "), translated(item.kind || ""), kind === "alike" && distances.has(index) ? t`distance ${distances.get(index).toFixed(4)}` : ""].filter(Boolean).join(", ") }), box);
    };
    // Of those that are the same the best stays; what is blurred or small is shown, and nothing of it is ticked.
    const groups = (title, kind, found, proposes) => (found.length ? [make("h3", { text: `${title}: ${found.length}` }), ...found.slice(0, SHOWN_GROUPS).map((group) => make("div", { class: "kl-data-group" }, ...group.map((index, place) => choice(index, proposes && place > 0, kind)))),
      found.length > SHOWN_GROUPS ? make("p", { class: "kl-note", text: t`The first ${SHOWN_GROUPS} are shown; look again afterwards.` }) : null] : []);
    const body = [leaks.length && make("p", { class: "kl-note", text: t`${leaks.length} of these groups are trained and held out alike, so that the held-out loss is too low: leave out all but one of each.` }), ...groups(t`The same file`, "same", same, true), ...groups(t`Nearly the same`, "near", near, true), ...groups(t`Alike for the model`, "alike", likes.map((group) => group.map(([index]) => index)), false), ...groups(t`Blurred`, "blurred", blurred.map((index) => [index]), false), ...shared.flatMap(({ images }, number) => groups(t`The same mark at the same place, which training learns`, `mark${number}`, [images], false)), ...groups(t`With a border, which training learns`, "framed", framed.map((index) => [index]), false), ...groups(t`Small for the training size`, "small", tiny.map((index) => [index]), false),
      ...unreadable.map(({ index, why }) => make("p", { class: "kl-note", text: `${desk.known.items[index].name} ${translated(why)}` }))].filter(Boolean);
    const dialog = openDialog(t`Proposals`, make("p", { class: "kl-note", text: body.length ? t`What is ticked would be left out: moved, with its caption, to a hidden folder of the data set, from where it can be brought back.` : t`No duplicates, no shared watermark, nothing blurred, framed or small.` }),
      make("div", { class: "kl-data-rows", tabindex: "0", role: "region", "aria-label": t`What was found` }, ...body), make("div", { class: "kl-row" }, go, close));
  }
}
