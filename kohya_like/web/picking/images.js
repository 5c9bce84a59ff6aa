// "Add images": from the computer in front of somebody, a telephone's too, into a data set with a name on the studio's. Talks with the
// routes of kohya_like/datasets.py. Nothing is in the data set before everything has arrived.

import { joined, phrased, t, translated } from "../common/language.js";
import { find, make, say } from "../common/page.js";
import { makeBar } from "../common/progress.js";
import { ask, eachLine, headers, post } from "../common/studio.js";
import { bytes, plural } from "../common/words.js";
import { openDialog } from "./dialog.js";

const SHOWN = 500; // names of files that were left out

// The files of folders that were dropped too: {file, name}, the name with folders.
async function filesOf({ entries, files }) {
  const found = [];
  async function walk(entry, above) {
    const name = `${above}${entry.name}`;
    if (entry.isFile) {
      found.push({ file: await new Promise((take, fail) => entry.file(take, fail)), name });
      return;
    }
    const reader = entry.createReader();
    for (;;) {
      const some = await new Promise((take, fail) => reader.readEntries(take, fail));
      if (!some.length) return;
      for (const each of some) await walk(each, `${name}/`);
    }
  }
  for (const entry of entries) await walk(entry, "");
  return entries.length ? found : [...files].map((file) => ({ file, name: file.webkitRelativePath || file.name }));
}

// One file, with the share of it that has gone out. Fetch tells nothing of that.
function send(address, file, signal, sent) {
  return new Promise((take, fail) => {
    const request = new XMLHttpRequest();
    request.open("POST", address);
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    // By what a file says of itself the studio might take it for an order.
    request.setRequestHeader("content-type", "application/octet-stream");
    request.upload.addEventListener("progress", (event) => sent(event.loaded));
    request.addEventListener("load", () => {
      try {
        const answer = JSON.parse(request.responseText);
        take(request.status === 200 ? answer : { problem: answer.detail || t`The studio answered ${request.status}.` });
      } catch (error) {
        take({ problem: t`The studio answered ${request.status}: ${error.message}` });
      }
    });
    request.addEventListener("error", () => fail(new Error(t`The studio does not answer, or the file cannot be read any more.`)));
    request.addEventListener("abort", () => fail(new Error(t`Cancelled.`)));
    signal.addEventListener("abort", () => request.abort());
    request.send(file);
  });
}

// given: what was dropped; field: what the field holds. take(folder) gets the folder of the data set.
export async function gather(given, field, take) {
  const chosen = []; // {file, name}
  let known = null; // the data sets that are there
  let isNamed = false; // by somebody
  const total = () => chosen.reduce((sum, { file }) => sum + file.size, 0);
  const cancelling = new AbortController();
  const name = make("input", { type: "text", id: "kl-add-name", list: "kl-add-names", autocomplete: "off", spellcheck: "false", "aria-describedby": "kl-add-about" });
  const names = make("datalist", { id: "kl-add-names" });
  const about = make("p", { class: "kl-note", id: "kl-add-about" });
  const input = (id, text, more) => make("span", { class: "kl-upload" }, make("input", { type: "file", id, class: "kl-file", multiple: true, ...more, onchange: async (event) => {
    await add({ entries: [], files: event.target.files });
    event.target.value = "";
  } }), make("label", { for: id, class: "kl-button", text }));
  const zone = make("div", { class: "kl-zone" },
    make("p", { text: t`Drop images, folders or zips here, or` }),
    make("div", { class: "kl-row" }, input("kl-add-files", t`Choose images or zips`, { accept: "image/*,.zip,.jxl,.avif,.heic,.heif,.txt,.caption" }), input("kl-add-folder", t`Choose a folder`, { webkitdirectory: true })));
  const status = make("p", { class: "kl-status", role: "status" });
  const bar = makeBar(t`Progress of the upload`);
  const report = make("div", { class: "kl-add-report" });
  const go = make("button", { type: "button", class: "kl-button kl-strong", id: "kl-add-go", text: t`Add`, disabled: true, onclick: () => start() });
  const close = make("button", { type: "button", class: "kl-button", id: "kl-add-close", text: t`Cancel`, onclick: () => dialog.close() });
  const form = make("div", { class: "kl-add-form" }, make("label", { for: name.id, text: t`Name of the data set` }), name, names, about, zone);
  bar.root.hidden = true;
  const dialog = openDialog(t`Add images`, form, status, bar.root, report, make("div", { class: "kl-row" }, go, close));
  dialog.addEventListener("close", () => cancelling.abort());
  dialog.addEventListener("drop", (event) => form.hidden || add({ files: [...event.dataTransfer.files], entries: [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean) }));
  const reading = add(given);
  name.addEventListener("input", () => (isNamed = true));
  known = await ask("/kl/datasets");
  names.append(...known.names.map((value) => make("option", { value })));
  say(about, t`Kept in ${known.folder}. Pixels stay as they are; what a file tells of place, time and camera is taken out. Captions are files of the same name (cat.txt beside cat.jpg).`);
  await reading;
  propose();

  // The data set in the field is added to; otherwise it is called as the folder or zip is.
  function propose() {
    if (isNamed || !known) return;
    const present = field.startsWith(known.folder) ? field.slice(known.folder.length + 1) : "";
    const folder = chosen.length && (/^(.+)\.zip$/i.exec(chosen[0].name) || /^([^/]+)\//.exec(chosen[0].name));
    name.value = known.names.includes(present) ? present : folder ? folder[1] : t`my-images`;
  }

  async function add(more) {
    try {
      chosen.push(...await filesOf(more));
    } catch (error) {
      say(status, t`Not all of it can be read: ${error.message}`);
      return;
    }
    propose();
    go.disabled = !chosen.length;
    if (chosen.length) say(status, phrased([plural(chosen.length, "file", "files"), bytes(total())]));
    if (chosen.length) go.focus();
  }

  function fail(text) {
    form.hidden = false;
    bar.root.hidden = true;
    go.hidden = false;
    say(status, "");
    report.replaceChildren(make("p", { class: "kl-error", role: "alert", text: translated(text) }));
  }

  async function start() {
    report.replaceChildren();
    const { upload, problem } = await post("/kl/datasets/begin", { name: name.value });
    if (problem) {
      fail(problem);
      name.focus();
      return;
    }
    form.hidden = go.hidden = true;
    bar.root.hidden = false;
    close.focus();
    try {
      await sendAll(upload);
      let last = { problem: t`The studio went away before it had everything.` };
      say(status, t`Checking the images …`);
      await eachLine(await fetch("/kl/datasets/finish", { method: "POST", headers: headers(), signal: cancelling.signal, body: JSON.stringify({ upload }) }), (said) => {
        last = said;
        if (said.of) bar.show(said.done / said.of);
        if (said.of) say(status, t`Checking ${said.done} of ${said.of} …`);
      });
      if (last.problem) throw new Error(last.problem);
      tell(last);
    } catch (error) {
      if (!cancelling.signal.aborted) fail(error.message);
      // It is swept away after a day at the latest.
      await post("/kl/datasets/cancel", { upload }).catch((gone) => console.info("The upload is left behind:", gone.message));
    }
  }

  async function sendAll(upload) {
    const whole = total() || 1;
    let before = 0;
    for (const [index, each] of chosen.entries()) {
      say(status, t`Sending ${index + 1} of ${chosen.length} …`);
      // Of what is left out by its ending only the name is sent, so that it can be named.
      const isTaken = known.endings.some((ending) => each.name.toLowerCase().endsWith(ending));
      const answer = await send(`/kl/datasets/upload?upload=${upload}&file=${encodeURIComponent(each.name)}`, isTaken ? each.file : new Blob(), cancelling.signal, (sent) => bar.show((before + sent) / whole));
      if (answer.problem) throw new Error(answer.problem);
      before += each.file.size;
      bar.show(before / whole);
    }
  }

  // said: {folder, images, captions, pairs, there, renamed, left_out: {reason: [name]}, notes: [text]}
  function tell(said) {
    const left = Object.entries(said.left_out);
    const count = left.reduce((sum, [, names]) => sum + names.length, 0);
    const facts = [
      said.images || !said.there ? t`Added: ${plural(said.images, "image", "images")}, ${plural(said.captions, "caption", "captions")}.` : said.captions ? t`Added: ${plural(said.captions, "caption", "captions")}.` : t`Nothing new.`,
      said.pairs ? t`Edit pairs: ${said.pairs}.` : "",
      said.there ? t`There already: ${plural(said.there, "file", "files")}.` : "",
      said.renamed ? t`${said.renamed} got a number behind the name, because another image has it.` : "",
      count ? t`Left out: ${plural(count, "file", "files")}.` : "",
    ];
    bar.root.hidden = true;
    say(status, joined(facts));
    let rest = SHOWN;
    const rows = left.map(([reason, names]) => {
      const shown = names.slice(0, Math.max(rest, 1));
      rest -= shown.length;
      const which = [...shown, ...(names.length > shown.length ? [t`and ${names.length - shown.length} more`] : [])].join(", ");
      return make("li", {}, make("strong", { text: t`${which}: ` }), translated(reason));
    });
    report.replaceChildren(...said.notes.map((text) => make("p", { class: "kl-note", text: translated(text) })), rows.length ? make("ul", { class: "kl-plain kl-scroll", tabindex: "0", "aria-label": t`Files that were left out` }, ...rows) : "");
    close.textContent = t`Done`;
    close.focus();
    if (said.folder) take(said.folder);
    if (said.folder) find(dialog, "#kl-add-close").focus();
  }
}
