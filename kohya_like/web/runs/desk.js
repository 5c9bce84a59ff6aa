// What people do with a run that is there: star, name, tag and describe it, and delete it. Fetched when the Runs tab shows a run.

import { html, render } from "../common/html.js";
import { language, listed, t } from "../common/language.js";
import { make } from "../common/page.js";
import { address, post, withToken } from "../common/studio.js";
import { runWords, tagWords, triedWords } from "../common/words.js";
import { openDialog } from "../picking/dialog.js";

const split = (text) => [...new Set(text.split(",").map((tag) => tag.trim().replace(/\s+/g, " ")).filter(Boolean))];

// view: the RunView in which root stands.
export function makeDesk(view, root) {
  let run = null; // the last answer of the studio about it
  let edit = null; // what is being written, and `read`: what it began with
  let problem = "";
  let promised = ""; // what was said of the newest wish
  let others = [];

  async function tell(order) {
    try {
      const said = await post("/kl/desk/say", { run: run.name, ...order });
      if (said.label !== undefined) run = { ...run, ...said };
      problem = "";
      view.poll();
      view.options.changed();
      return said;
    } catch (error) {
      problem = error.message;
      return null;
    } finally {
      draw();
    }
  }

  function begin() {
    const { name, label, notes, tags } = run;
    edit = { name, label, notes, tags: tags.join(", "), read: { label, notes, tags } };
    others = [];
    draw();
    root.querySelector("#kl-desk-label").focus();
  }

  function finish() {
    edit = null;
    problem = "";
    draw();
    root.querySelector(".kr-desk-edit").focus();
  }

  async function save() {
    const { read } = edit;
    const tags = split(edit.tags);
    const words = Object.fromEntries(["label", "notes"].filter((name) => edit[name] !== read[name]).map((name) => [name, { before: read[name], after: edit[name] }]));
    const said = await tell({ ...words, tags: { add: tags.filter((tag) => !read.tags.includes(tag)), remove: read.tags.filter((tag) => !tags.includes(tag)) } });
    if (!said) return;
    others = said.others;
    if (!others.length) finish();
    else draw();
  }

  function keepMine() {
    for (const name of others) edit.read[name] = run[name];
    save();
  }

  function takeTheirs() {
    for (const name of others) edit[name] = edit.read[name] = run[name];
    others = [];
    draw();
  }

  const isAsked = ({ asked }) => Boolean(asked && (asked.save || asked.sample || asked.other));

  // Sends an order; what is answered is the run's part of this name, and sentence is what to say of it.
  async function send(part, place, order, sentence) {
    try {
      const answer = await post(place, order);
      run = { ...run, [part]: answer };
      problem = "";
      promised = sentence;
      view.note(sentence);
    } catch (error) {
      problem = error.message;
    }
    view.poll();
    view.options.changed();
    draw();
  }

  // Of a run at work: what it shall do after its present step.
  const ask = (order, sentence) => send("asked", address(run.name, "/ask"), order, sentence);
  const plan = (order, sentence) => send("queue", "/kl/desk/queue", { run: run.name, ...order }, sentence);

  function stopAt(event) {
    event.preventDefault();
    const typed = event.currentTarget.elements.step.value.trim();
    if (!/^[0-9]+$/.test(typed)) {
      problem = t`Stop after step "${typed}": a whole number is needed.`;
      return draw();
    }
    ask({ what: "stop_at", step: Number(typed) }, t`It will save its state and end after step ${typed}; Resume goes on from there.`);
  }

  // Other prompts than those of the run: once, or from now on.
  function otherPrompts() {
    const written = () => root.querySelector("#kl-run-prompts").value;
    const order = (what, sentence) => {
      view.previews.wait(written());
      ask({ what, text: written() }, sentence);
    };
    const start = run.asked.prompts.includes("\n") || !/\.(txt|toml|json)$/i.test(run.asked.prompts) ? run.asked.prompts : "";
    const button = (words, what, sentence) => html`<button type="button" class="kr-button" onClick=${() => order(what, sentence)}>${words}</button>`;
    return html`<details class="kr-fold"><summary>${t`Prompts`}</summary><label for="kl-run-prompts">${t`One a line, with flags such as --w --h --d`}</label>
      <textarea id="kl-run-prompts" class="kr-filter" rows="4" maxlength="20000" spellcheck="false" defaultValue=${start}></textarea>
      <div class="kr-actions">${button(t`Sample these once`, "sample", t`It draws these prompts after the present step, once.`)}
        ${button(t`Use these from now on`, "prompts", t`Previews are drawn of these prompts from now on; its settings have them too.`)}</div></details>`;
  }

  // A field that is typed into has a value to begin with, and a key that makes it anew when that changes: a run is drawn again and again, and
  // a value would take the place of what is being typed.
  function work() {
    const { asked } = run;
    if (run.state !== "running" || run.stopping || !asked || asked.pause === undefined || !run.step) return null;
    const button = (words, what, sentence) => html`<button type="button" class="kr-button" onClick=${() => ask({ what }, sentence)}>${words}</button>`;
    const waits = [asked.save && t`a save`, asked.sample && t`samples`, asked.other && t`other prompts`].filter(Boolean);
    return html`<div class="kr-actions" role="group" aria-label=${t`While it runs`}>
        ${button(t`Save now`, "save", t`It saves its file and its state after the present step.`)}
        ${asked.draws && button(t`Sample now`, "sample", t`It draws its sample prompts after the present step.`)}
        ${asked.pause ? button(t`Go on`, "go_on", t`It goes on.`) : button(t`Pause`, "pause", t`It saves its state after the present step and waits; its memory stays taken. Go on continues.`)}
        <form class="kr-stop-at" onSubmit=${stopAt}><label for="kl-stop-at">${t`Stop after step`}</label>
          <input key=${asked.stop_step} id="kl-stop-at" name="step" class="kr-filter" inputmode="numeric" defaultValue=${asked.stop_step ?? ""} /><button type="submit" class="kr-button">${t`Set`}</button>
          ${asked.stop_step !== null && html`<button type="button" class="kr-button" onClick=${() => ask({ what: "stop_at", step: null }, t`It trains to its last step.`)}>${t`Train to the end`}</button>`}</form></div>
      ${asked.draws && asked.prompts && otherPrompts()}
      ${waits.length > 0 && html`<p class="kr-note">${t`Asked for after the present step: ${listed(waits)}.`}</p>`}`;
  }

  // datetime-local writes the reader's own time.
  const local = (unix) => new Date((unix - 60 * new Date(1000 * unix).getTimezoneOffset()) * 1000).toISOString().slice(0, 16);

  function startAt(event) {
    event.preventDefault();
    const { value } = event.currentTarget.elements.time;
    plan({ not_before: value ? new Date(value).getTime() / 1000 : null }, value ? t`It starts then, or as soon after it as a device is free.` : t`It starts as soon as a device is free.`);
  }

  // Of a run that waits: its place, and what it waits for.
  function waits() {
    const { queue } = run;
    if (run.state !== "queued" || !queue || queue.of === undefined) return null;
    const { place, of, held, not_before, after, others } = queue;
    const button = (words, order, sentence, off) => html`<button type="button" class="kr-button" disabled=${off} onClick=${() => plan(order, sentence)}>${words}</button>`;
    const follow = (event) => {
      const name = event.currentTarget.value;
      plan({ after: name || null }, name ? t`It starts once that run has ended, in whatever way.` : t`It waits for no other run.`);
    };
    return html`<section class="kr-queue" aria-label=${t`In the queue`}><p>${of === 1 ? t`The only run that waits` : t`${place + 1} of ${of} that wait`}${held ? t`, held` : ""}</p>
      <div class="kr-actions">${of > 1 && [button(t`Earlier`, { place: place - 1 }, t`Moved.`, place === 0), button(t`Later`, { place: place + 1 }, t`Moved.`, place === of - 1)]}
        ${held ? button(t`Release`, { held: false }, t`It starts as soon as a device is free.`) : button(t`Hold`, { held: true }, t`It waits until it is released; runs behind it pass by.`)}</div>
      <form class="kr-stop-at" onSubmit=${startAt}><label for="kl-start-at">${t`Start at`}</label><input key=${not_before} id="kl-start-at" name="time" class="kr-filter" type="datetime-local" defaultValue=${not_before ? local(not_before) : ""} /><button type="submit" class="kr-button">${t`Set`}</button></form>
      ${others.length > 0 && html`<div class="kr-stop-at"><label for="kl-start-after">${t`Start after`}</label><select id="kl-start-after" class="kr-filter" value=${after} onChange=${follow}><option value="">${t`no other run`}</option>
        ${others.map((each) => html`<option key=${each.name} value=${each.name}>${runWords(each.name, each)}</option>`)}</select></div>`}</section>`;
  }

  function remove() {
    const { name } = run;
    const wrong = make("p", { class: "kl-error", role: "alert" });
    const keep = make("button", { type: "button", class: "kl-button", text: t`Keep it`, onclick: () => dialog.close() });
    const go = make("button", { type: "button", class: "kl-button kl-strong", text: t`Move to the trash`, onclick: async () => {
      view.leave(true);
      try {
        await post("/kl/desk/delete", { run: name });
        dialog.close();
        view.options.missing(t`${runWords(name, run)} is in the trash: Disk and trash brings it back.`);
      } catch (error) {
        wrong.textContent = error.message;
        view.leave(false);
      }
    } });
    const dialog = openDialog(t`Delete ${runWords(name, run)}?`, make("p", { text: t`Its folder with all files, images and states goes into the trash of the output folder, and can be put back for 30 days. It goes on taking up disk until the trash is emptied.` }),
      wrong, make("div", { class: "kl-row" }, go, keep));
    keep.focus();
  }

  const field = (name, label, control) => html`<label for=${`kl-desk-${name}`}>${label}</label>${control}`;
  const put = (name) => (event) => (edit[name] = event.currentTarget.value);
  const key = (event) => event.key === "Escape" && finish();

  function form() {
    return html`<form class="kr-desk-form" aria-label=${t`What is said of this run`} onKeyDown=${key} onSubmit=${(event) => { event.preventDefault(); save(); }}>
      ${field("label", t`Name`, html`<input id="kl-desk-label" class="kr-filter" maxlength="120" value=${edit.label} placeholder=${triedWords(run.tried) || run.name} onInput=${put("label")} />`)}
      ${field("tags", t`Tags, with commas between`, html`<input id="kl-desk-tags" class="kr-filter" value=${edit.tags} onInput=${put("tags")} />`)}
      ${field("notes", t`Notes`, html`<textarea id="kl-desk-notes" class="kr-filter" rows="4" maxlength="20000" value=${edit.notes} onInput=${put("notes")}></textarea>`)}
      ${others.length > 0 && html`<div class="kr-warnings" role="alert"><p>${t`Somebody has changed this meanwhile:`} ${others.map((name) => `"${run[name]}"`).join(", ")}</p>
        <div class="kr-actions"><button type="button" class="kr-button" onClick=${keepMine}>${t`Keep mine`}</button><button type="button" class="kr-button" onClick=${takeTheirs}>${t`Take theirs`}</button></div></div>`}
      <div class="kr-actions"><button type="submit" class="kr-button kr-primary">${t`Save`}</button><button type="button" class="kr-button" onClick=${finish}>${t`Leave as it was`}</button></div></form>`;
  }

  function draw() {
    const ended = run.state !== "running" && run.state !== "queued";
    render([work(), waits(), html`<div class="kr-actions" role="group" aria-label=${t`About this run`}>
        <button type="button" class="kr-button" aria-pressed=${String(run.starred)} onClick=${() => tell({ starred: !run.starred })}>${run.starred ? "★" : "☆"} ${t`Star`}</button>
        <button type="button" class="kr-button kr-desk-edit" hidden=${edit !== null} onClick=${begin}>${t`Name, tags, notes`}</button>
        <a class="kr-button" download href=${withToken(address(run.name, "/report"), `&language=${language}`)}>${t`Report`}</a>
        <a class="kr-button" download href=${withToken(address(run.name, "/support"))}>${t`Support file`}</a>
        <button type="button" class="kr-button" hidden=${!ended} onClick=${remove}>${t`Delete`}</button></div>`,
      run.tags.length > 0 && !edit && html`<ul class="kr-tags" aria-label=${t`Tags`}>${run.tags.map((tag) => html`<li key=${tag}>${tagWords(tag)}</li>`)}</ul>`,
      run.notes && !edit && html`<p class="kr-notes">${run.notes}</p>`,
      edit && form(),
      problem && html`<p class="kr-desk-problem" role="alert">${problem}</p>`], root);
  }

  return {
    show(answer) {
      if (run && answer.name !== run.name) {
        edit = null;
        problem = "";
      }
      // What it was to do after its step is done.
      if (run && isAsked(run) && !isAsked(answer) && view.status.textContent === promised) view.note("");
      run = answer;
      draw();
    },
  };
}
