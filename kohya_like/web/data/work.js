// Work on the images that takes long, as a process of its own: its form, what would leave this machine, its progress, and what came of it.
// Talks with kohya_like/data_room/jobs.py.

import { Console } from "../common/console.js";
import { blame, makeBrowse, makeField } from "../common/field.js";
import { ended, joined, t, translated } from "../common/language.js";
import { make, say } from "../common/page.js";
import { makeBar } from "../common/progress.js";
import { store, stored } from "../common/stored.js";
import { ask, post, repeat } from "../common/studio.js";
import { plural } from "../common/words.js";
import { openDialog } from "../picking/dialog.js";

const DRAFT = "kl.data.work";
const STATES = { queued: t`Waiting`, running: t`Running`, finished: t`Finished`, failed: t`Failed`, cancelled: t`Stopped`, died: t`Died` };
const FACES = { "a face at the edge of the image": t`face at the edge`, "a face outside of the cut": t`face outside of the cut`, "a face that the cut goes through": t`face cut through` };
// Of a report, whose lines begin small and have no end.
const sentence = (line) => {
  const words = `${line[0].toUpperCase()}${line.slice(1)}`;
  return /[.!?…。]$/.test(words) ? words : ended(words);
};
const STARTED = ["queued", "running"];

const keyField = (id) => {
  const node = make("input", { type: "password", id, autocomplete: "off", spellcheck: "false", placeholder: t`none` });
  const root = make("div", { class: "kl-field" }, make("div", { class: "kl-head" }, make("label", { for: id, text: t`Key of the endpoint` })),
    make("div", { class: "kl-control" }, node), make("p", { class: "kl-help", text: t`Given to the process and kept in no file and no log.` }));
  return { root, node };
};

/**
 * The card of what was started last for the data set that is open.
 * @param {any} desk
 * @param {(texts: Record<string, string>, masks: Record<string, boolean>) => void} after is told which captions and masks were written
 */
export function makeWork(desk, after) {
  const title = make("h2");
  const badge = make("span", { class: "kr-badge" });
  const bar = makeBar(t`Progress of the work`);
  const line = make("p", { class: "kl-note", role: "status" });
  const wrong = make("p", { class: "kl-error", role: "alert", hidden: true });
  const button = (text, act) => make("button", { type: "button", class: "kl-button", text, onclick: act });
  const stop = button(t`Stop`, () => order("stop"));
  const key = keyField("kl-data-key-again");
  const resume = button(t`Resume`, () => order("resume"));
  const close = make("button", { type: "button", class: "kl-button", text: t`Close`, "aria-label": t`Close what was done`, onclick: () => (root.hidden = true) });
  const log = new Console();
  const others = make("div", { class: "kl-row" }); // a button for each other one that waits or is at work
  const root = make("section", { class: "kl-card kl-data-work", "aria-label": t`Work on the images`, hidden: true },
    make("div", { class: "kl-row kl-between" }, title, badge), bar.root, line, wrong, key.root, make("div", { class: "kl-row" }, stop, resume, close), others, make("div", { class: "kl-live" }, log.root));
  let labels = {};
  let run = "";
  let tool = "";
  let offset = -1;
  let state = "";

  const poll = repeat(root, async () => {
    if (!run || (offset >= 0 && !STARTED.includes(state))) return 2;
    try {
      await follow();
    } catch (error) {
      tell(error.message);
      return 3;
    }
    return 1;
  });

  function tell(sentence) {
    wrong.hidden = !sentence;
    say(wrong, sentence);
  }

  function show(row) {
    run = row.name;
    state = row.state;
    offset = -1;
    root.hidden = false;
    key.node.value = "";
    tell("");
    tool = row.tool;
    title.textContent = labels[tool] || "";
    poll();
    learn();
  }

  // The tools, and what was started for the data set that is open; null where it cannot be said.
  async function learn() {
    const known = await post("/kl/data/tool/forms", { room: desk.known.room }).catch(() => null);
    if (!known || known.problems) return null;
    labels = Object.fromEntries(known.tools.map(({ name, label }) => [name, translated(label)]));
    others.replaceChildren(...known.runs.filter((row) => row.name !== run && STARTED.includes(row.state)).map((row) => button(t`Show: ${labels[row.tool]}`, () => show(row))));
    title.textContent = labels[tool] || "";
    return known;
  }

  async function follow() {
    const name = run;
    const answer = await ask(`/kl/tools/run/${encodeURIComponent(name)}?console=${offset}`);
    if (name !== run) return;
    offset = answer.console.offset;
    const hasEnded = STARTED.includes(state) && !STARTED.includes(answer.state);
    state = answer.state;
    const isOn = STARTED.includes(state);
    badge.dataset.state = state === "cancelled" ? "stopped" : state;
    say(badge, STATES[state]);
    bar.root.hidden = !isOn;
    bar.show(answer.percent === null ? null : answer.percent / 100, state === "running");
    const lines = answer.report && Array.isArray(answer.report.lines) ? joined(answer.report.lines.map((each) => sentence(translated(each)))) : "";
    const last = answer.console.open || answer.console.lines[answer.console.lines.length - 1] || "";
    say(line, state === "queued" ? t`It waits until a device is free.` : isOn ? last || t`Starting …` : lines || joined(answer.why.map(translated)));
    stop.hidden = !isOn;
    resume.hidden = isOn || state === "finished";
    key.root.hidden = resume.hidden || !answer.texts.endpoint;
    close.hidden = isOn;
    log.update(answer.console);
    if (state === "died") log.root.open = true;
    await renew();
    const known = hasEnded && (await learn());
    if (known && state === "finished" && ["faces", "duplicates"].includes(answer.tool)) take(known);
  }

  function take({ faces, alike }) {
    const had = desk.faces.size + desk.alike.length;
    desk.alike = alike || [];
    desk.faces = new Map(Object.entries(faces || {}).map(([index, why]) => [Number(index), FACES[why] || why]));
    if (had || desk.faces.size || desk.alike.length) after({}, {});
  }

  // Captions and masks that were written since, here or by whomever.
  async function renew() {
    const room = desk.known && desk.known.room;
    if (!room) return;
    const said = await post("/kl/data/news", { room, news: desk.known.news, maskNews: desk.known.maskNews });
    if (!desk.known || desk.known.room !== room || said.problem) return;
    desk.known.news = said.news;
    desk.known.maskNews = said.maskNews;
    if (Object.keys(said.texts).length + Object.keys(said.masks).length) after(said.texts, said.masks);
  }

  async function order(what) {
    tell("");
    const answer = await post(`/kl/data/tool/${what}`, { room: desk.known.room, name: run, key: key.node.value }).catch((error) => ({ problems: [{ message: error.message }] }));
    if (answer.problems) tell(answer.problems.map(({ message }) => translated(message)).join(" "));
    else if (answer.run) show(answer.run);
    else await poll();
  }

  return {
    root, show,
    // Of a data set that was opened: what is under way for it, or was stopped.
    async look() {
      const known = await learn();
      if (!known) return;
      take(known);
      const newest = known.runs[0];
      if (newest && newest.state !== "finished") show(newest);
      else if (newest?.name !== run) root.hidden = true;
    },
  };
}

/**
 * The form of a tool, for some images; what would leave this machine is said before it does.
 * @param {any} desk
 * @param {string} name of the tool
 * @param {number[]} indices
 * @param {(row: any) => void} started
 * @param {Record<string, string | boolean>} given what the form holds already, whatever it held last
 */
export async function openWork(desk, name, indices, started, given = {}) {
  const known = await post("/kl/data/tool/forms", { room: desk.known.room }).catch((error) => ({ problems: [{ message: error.message }] }));
  const status = make("p", { class: "kl-status", role: "status" });
  const wrong = make("div", { class: "kl-error", role: "alert", hidden: true });
  const close = make("button", { type: "button", class: "kl-button", text: t`Close`, "aria-label": t`Close the form`, onclick: () => dialog.close() });
  if (known.problems) {
    const dialog = openDialog(t`Not possible`, ...known.problems.map(({ message }) => make("p", { text: translated(message) })), make("div", { class: "kl-row" }, make("button", { type: "button", class: "kl-button", text: t`Close`, onclick: () => dialog.close() })));
    return;
  }
  const tool = known.tools.find((each) => each.name === name);
  const drafts = stored(DRAFT) || {};
  const draft = (drafts[name] = drafts[name] || {});
  const fields = new Map();
  const key = keyField("kl-data-key");
  key.root.hidden = true;
  const draw = (spec) => {
    const field = makeField(spec, `kl-data-work-${spec.name}`, () => {
      draft[spec.name] = field.read();
      store(DRAFT, drafts);
      turn();
    });
    if (spec.path) field.node.after(makeBrowse(spec, field.node));
    const last = spec.name in given ? given[spec.name] : draft[spec.name];
    field.set(typeof last === typeof spec.default ? last : spec.default);
    fields.set(spec.name, field);
    return field.root;
  };
  const turn = () => (key.root.hidden = !(fields.get("endpoint") && fields.get("endpoint").read().trim()));
  const basic = tool.fields.filter((spec) => spec.basic);
  const rest = tool.fields.filter((spec) => !spec.basic);
  const go = make("button", { type: "button", class: "kl-button kl-strong", text: t`Start`, "aria-label": t`Start: ${translated(tool.label)}`, onclick: () => start() });
  const form = make("div", { class: "kl-data-form" }, make("p", { class: "kl-note", text: t`${translated(tool.about)} For ${plural(indices.length, "image", "images")}, those that are shown.` }),
    make("div", { class: "kl-grid" }, ...basic.map(draw)), key.root, make("details", { class: "kl-tool-more" }, make("summary", { text: t`More` }), make("div", { class: "kl-grid" }, ...rest.map(draw))),
    wrong, status, make("div", { class: "kl-row" }, go, close));
  const leaving = make("div", { class: "kl-data-form", hidden: true });
  const dialog = openDialog(translated(tool.label), form, leaving);
  turn();

  async function start(agreed = "") {
    go.disabled = true;
    say(status, "");
    const texts = Object.fromEntries([...fields].map(([option, field]) => [option, field.read()]));
    const answer = await post("/kl/data/tool/start", { room: desk.known.room, tool: name, indices, texts, key: key.node.value, known: agreed }).catch((error) => ({ problems: [{ option: "", message: error.message }] }));
    go.disabled = false;
    if (answer.run) {
      dialog.close();
      started(answer.run);
      return;
    }
    const asks = Boolean(answer.leaving);
    form.hidden = asks;
    leaving.hidden = !asks;
    if (asks) askFirst(answer);
    else blame(fields, wrong, answer.problems || []);
  }

  function askFirst({ leaving: sentences, known: digest }) {
    const send = make("button", { type: "button", class: "kl-button kl-strong", text: t`Send them`, onclick: () => start(digest) });
    const back = make("button", { type: "button", class: "kl-button", text: t`Back to the form`, onclick: () => {
      leaving.hidden = true;
      form.hidden = false;
      go.focus();
    } });
    leaving.replaceChildren(make("h3", { text: t`This is sent` }), make("ul", { class: "kl-data-leaving" }, ...sentences.map((text) => make("li", { text: translated(text) }))), make("div", { class: "kl-row" }, send, back));
    back.focus();
  }
}
