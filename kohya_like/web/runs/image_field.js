// The image that a tool of a run works on: chosen in the browser, dropped, or a path on the studio's computer.

import { makeBrowse, makeField } from "../common/field.js";
import { t } from "../common/language.js";
import { make } from "../common/page.js";
import { withToken } from "../common/studio.js";
import { uploadImage } from "../common/upload.js";

const UPLOADED = /^[0-9a-f]{32}\.png$/;

// A field as makeField makes them. What it holds is a path, or the name of an upload. maxBytes: the most that the studio takes.
export function imageField(spec, ident, edited, maxBytes) {
  let upload = "";
  const image = make("img", { class: "kr-given-image", alt: t`The image as given` });
  const remove = make("button", { type: "button", class: "kr-button", text: t`Remove`, onclick: () => {
    hold("");
    edited();
    file.focus();
  } });
  const given = make("div", { class: "kr-given", hidden: true }, image, remove);
  const file = make("input", { type: "file", id: `${ident}-file`, class: "kl-file", accept: "image/*,.jxl", "aria-describedby": `${ident}-error` });
  const chooser = make("label", { class: "kr-given-choose", for: file.id }, file, make("span", { class: "kl-button", text: t`Choose an image` }));
  const field = makeField({ ...spec, label: t`Image` }, ident, () => {
    if (field.node.value) hold("");
    edited();
  }, { below: make("div", { class: "kr-given-row" }, chooser, make("span", { class: "kr-note", text: t`or drop one here` }), given) });
  field.node.after(makeBrowse({ ...spec, label: t`Image` }, field.node));
  field.node.placeholder = t`a path on the studio's computer`;

  function hold(name) {
    upload = name;
    given.hidden = !name;
    if (name) image.src = withToken("/kl/predict/image", `&name=${encodeURIComponent(name)}&size=thumb`);
    else image.removeAttribute("src");
  }

  // Uploads are kept for a day.
  image.addEventListener("error", () => {
    hold("");
    edited();
  });

  function refuse(text) {
    field.error.textContent = text;
    field.error.hidden = false;
    field.node.setAttribute("aria-invalid", "true");
  }

  async function take(chosen) {
    if (!chosen) return;
    field.clear();
    try {
      const image = await uploadImage(chosen, maxBytes);
      field.node.value = "";
      hold(image.name);
      edited();
    } catch (failure) {
      refuse(failure.message);
    }
  }

  file.addEventListener("change", () => {
    take(file.files[0]);
    file.value = "";
  });
  field.root.addEventListener("dragover", (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files") && event.preventDefault());
  field.root.addEventListener("drop", (event) => {
    if (!event.dataTransfer || !event.dataTransfer.files.length) return;
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  });
  return {
    ...field,
    read: () => upload || field.node.value,
    set(text) {
      const isUpload = UPLOADED.test(text);
      hold(isUpload ? text : "");
      field.node.value = isUpload ? "" : text;
    },
  };
}
