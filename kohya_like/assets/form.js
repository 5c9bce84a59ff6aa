// The form of the Train tab: draws the options from window.klSchema, keeps what the person types, searches, and shows what is wrong.
// Text of options and of people only ever enters the page through textContent.
(() => {
  "use strict";
  if (window.kl && window.kl.mount) return;

  const schema = window.klSchema;
  const DRAFT = "kl.draft";
  const DECIMAL_COMMA = /^\s*[-+]?\d*,\d+(e[-+]?\d+)?\s*$/i;
  const THOUSANDS = /^\s*[-+]?0*[1-9]\d*,\d{3}\s*$/;
  const SEEN = "kl.seen";
  const parts = {};
  const views = new Map(); // group -> fieldset on the page
  const controls = new Map(); // option -> control on the page
  const drafts = {}; // kind of run -> {option: text}
  const shared = {}; // option -> text, or null for the default, as the kind of run had it that was left last
  const problems = new Map(); // option -> [sentence]
  const filter = { words: [], changed: false, opened: null };
  const wanted = new Set(); // options that the chosen way leaves out and somebody asked for
  const special = {}; // kind of control -> how it is drawn, for controls with a file of their own
  const listeners = [];
  let way = schema.ways[0];
  let run = keyOf(Object.keys(schema.families)[0], way);

  const kl = (window.kl = Object.assign(window.kl || {}, {
    mount(name, element, props, trigger, watch, events) {
      const [kind, detail] = name.split(/:(.*)/);
      const root = element.querySelector(".kl-part") || element;
      root.replaceChildren();
      parts[kind]({ root, props, trigger, watch, detail, events });
    },
    fill,
    focus: goTo,
    make,
    values: () => ({ run, values: { ...drafts[run] } }),
  }));

  // ---- small things

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (name === "text") node.textContent = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  // Names in help texts stand between backticks.
  function rich(text) {
    return text.split("`").map((piece, index) => (index % 2 ? make("code", { text: piece }) : document.createTextNode(piece)));
  }

  function stored(key, place = localStorage) {
    try {
      return JSON.parse(place.getItem(key));
    } catch (error) {
      console.info("The browser keeps no drafts:", error.message);
      return null;
    }
  }

  function store(key, value, place = localStorage) {
    try {
      place.setItem(key, JSON.stringify(value));
    } catch (error) {
      console.info("The browser keeps no drafts:", error.message);
    }
  }

  function plural(count, one, many) {
    return `${count} ${count === 1 ? one : many}`;
  }

  // ---- what is in the form

  function keyOf(family, chosen) {
    return `${family}/${chosen.method}`;
  }

  const familyOf = (key) => key.split("/")[0];
  const specsOf = (block) => block.fields.map((index) => schema.fields[index]);
  const groupsOf = (key) => schema.runs[key].groups;
  const fieldsOf = (key) => groupsOf(key).flatMap((group) => group.blocks.flatMap(specsOf));
  const blocksIn = (title) => (groupsOf(run).find((group) => group.title === title) || { blocks: [] }).blocks;
  const fieldsIn = (title) => blocksIn(title).flatMap(specsOf);
  const defaults = (key) => Object.fromEntries(fieldsOf(key).map((spec) => [spec.name, spec.default]));

  // An option that the chosen way leaves out is shown all the same when it has a value, since it will take effect, or a problem.
  const isShown = (spec) => !way.hidden.includes(spec.name) || isChanged(spec) || problems.has(spec.name) || wanted.has(spec.name);
  const isGuest = (spec) => way.hidden.includes(spec.name);

  // A field sleeps until one of the options that it needs is on, has one of some values, or has none of them: see sleeping.py. One that
  // the kind of run does not have is no hindrance. What sleeps is kept here, greyed, and not written.
  const specOf = (name) => fieldsOf(run).find((spec) => spec.name === name);
  function isMet({ other, values, but }) {
    const now = drafts[run][other.name];
    if (values.length) return values.some((value) => same(other, String(now), value)) !== but;
    if (other.control === "check") return now === true;
    return String(now).trim() !== "" && !(other.control === "number" && Number(now) === 0);
  }

  function hindrance(spec) {
    const needs = (spec.needs || []).map((need) => ({ ...need, other: specOf(need.name) })).filter(({ other }) => other);
    for (const need of needs) {
      const deeper = hindrance(need.other);
      if (deeper) return deeper;
      if (isMet(need)) return null;
    }
    return needs.length ? needs : null;
  }

  const needed = new Set(schema.fields.flatMap((spec) => (spec.needs || []).map(({ name }) => name)));

  // Without effect, and nobody has given it a value or asked for it: left out.
  const isIdle = (spec) => !isChanged(spec) && !problems.has(spec.name) && !wanted.has(spec.name) && hindrance(spec) !== null;

  function condition(needs) {
    return needs.map(({ other, values, but }) => {
      if (values.length) return `${other.label} is ${but ? "not " : ""}${values.join(" or ")}`;
      if (other.control === "check") return `${other.label} is on`;
      return `${other.label} is ${other.control === "number" && !other.optional ? "not 0" : "given"}`;
    }).join(" or ");
  }
  const ownerOf = (spec) => schema.ways.find((other) => other !== way && other.method === way.method && !other.hidden.includes(spec.name));

  function same(spec, left, right) {
    if (left === right) return true;
    if (spec.control === "number" && String(left).trim() !== "" && String(right).trim() !== "") return Number(left) === Number(right);
    if (spec.control === "numbers" || spec.control === "size") {
      const plain = (text) => String(text).split(/[\s,x]+/).filter(Boolean);
      const [a, b] = [plain(left), plain(right)];
      if (spec.control === "size" && a.length === 1) a.push(a[0]);
      if (spec.control === "size" && b.length === 1) b.push(b[0]);
      return a.length === b.length && a.every((item, index) => Number(item) === Number(b[index]));
    }
    return false;
  }

  const isChanged = (spec) => !same(spec, drafts[run][spec.name], spec.default);

  function restore() {
    for (const key of Object.keys(schema.runs)) drafts[key] = defaults(key);
    // Each tab of the browser has a draft of its own; a new one begins with what was typed last in any.
    const draft = stored(DRAFT, sessionStorage) || stored(DRAFT);
    if (!draft || typeof draft !== "object" || !draft.runs) return;
    for (const [key, values] of Object.entries(draft.runs)) {
      if (!drafts[key]) continue;
      for (const spec of fieldsOf(key)) {
        const text = values[spec.name];
        if (typeof text === typeof spec.default) drafts[key][spec.name] = text;
      }
    }
    Object.assign(shared, draft.shared);
    if (!drafts[draft.run]) return;
    run = draft.run;
    way = schema.ways.find((each) => each.name === draft.way && keyOf(familyOf(run), each) === run) || wayFor(run, drafts[run]);
  }

  let saving = 0;
  function save() {
    saving = 0;
    const kept = {};
    for (const key of Object.keys(drafts)) {
      const different = fieldsOf(key).filter((spec) => drafts[key][spec.name] !== spec.default);
      if (different.length || key === run) kept[key] = Object.fromEntries(different.map((spec) => [spec.name, drafts[key][spec.name]]));
    }
    for (const place of [sessionStorage, localStorage]) store(DRAFT, { run, way: way.name, runs: kept, shared }, place);
  }
  function saveSoon() {
    if (!saving) saving = setTimeout(save, 200);
  }
  addEventListener("pagehide", () => saving && save());

  function publish(view) {
    view.props.value = { run, values: Object.fromEntries(fieldsIn(view.title).map((spec) => [spec.name, drafts[run][spec.name]])) };
  }

  function edit(spec, text) {
    drafts[run][spec.name] = text;
    const control = controls.get(spec.name);
    if (problems.delete(spec.name)) showProblem(spec.name);
    if (control) control.mark();
    const view = views.get(spec.group);
    if (view) {
      publish(view);
      view.count();
      countFolds(view);
    }
    if (needed.has(spec.name)) applyFilter();
    saveSoon();
    listeners.forEach((listen) => listen());
  }

  function fill(key, texts) {
    if (!schema.runs[key]) return;
    const other = key !== run;
    const fresh = defaults(key);
    for (const spec of fieldsOf(key)) {
      const text = texts[spec.name];
      if (typeof text === typeof spec.default) fresh[spec.name] = text;
    }
    drafts[key] = fresh;
    const before = way;
    run = key;
    way = wayFor(key, fresh);
    problems.clear();
    wanted.clear();
    refresh(other || way !== before);
    save();
  }

  // The way that settings are for: the one that has a place for every value, else the one that is chosen.
  function wayFor(key, texts) {
    const possible = schema.ways.filter((each) => keyOf(familyOf(key), each) === key);
    const specs = fieldsOf(key);
    const fits = (each) => !specs.some((spec) => each.hidden.includes(spec.name) && !same(spec, texts[spec.name], spec.default));
    const fitting = possible.filter(fits);
    return fitting.includes(way) ? way : fitting[0] || (possible.includes(way) ? way : possible[0]);
  }

  function refresh(redraw) {
    for (const view of views.values()) {
      if (redraw || view.isStale()) view.draw();
      else for (const spec of view.specs) if (controls.has(spec.name)) controls.get(spec.name).set(drafts[run][spec.name]);
      publish(view);
      view.count();
    }
    for (const name of controls.keys()) showProblem(name);
    applyFilter();
    listeners.forEach((listen) => listen());
  }

  // Brings options on the page that the chosen way leaves out, once they have a value or a problem.
  function showMore() {
    for (const view of views.values()) if (view.isStale()) view.draw();
    applyFilter();
  }

  function choose(family, name) {
    // A family that has not the chosen way brings its own first one.
    const has = (each) => Boolean(schema.runs[keyOf(family, each)]);
    const next = schema.ways.find((each) => each.name === name && has(each)) || schema.ways.find(has) || way;
    const key = keyOf(family, next);
    if (!schema.runs[key] || (key === run && next === way)) return;
    if (key !== run) carry(run, key);
    run = key;
    way = next;
    problems.clear();
    wanted.clear();
    refresh(true);
    save();
  }

  // What kinds of run share goes along, also past one that has it not: a value, and that somebody put it back to the default, which then
  // is each kind's own. What only one of them has stays with it and is there again later.
  function carry(from, to) {
    for (const spec of fieldsOf(from)) {
      const text = drafts[from][spec.name];
      shared[kindOf(spec)] = same(spec, text, spec.default) ? null : text;
    }
    for (const spec of fieldsOf(to)) {
      const text = shared[kindOf(spec)];
      // Each family has base models of its own; only the built-in one is there for all.
      const keepsOwn = spec.ofFamily && familyOf(from) !== familyOf(to) && (text !== "toy" || !same(spec, drafts[to][spec.name], spec.default));
      if (text !== undefined && !keepsOwn) drafts[to][spec.name] = text === null ? spec.default : text;
    }
  }

  // The same option with other choices is another one, and so is a number with another default: an adapter's learning rate would ruin a model.
  const kindOf = (spec) => `${spec.name} ${spec.control} ${spec.choices || ""} ${spec.control === "number" ? spec.default : ""}`;

  // ---- one control

  const id = (name) => `kl-${name}`;

  function input(spec, ident = id(spec.name)) {
    const common = { id: ident, name: spec.name, autocomplete: "off", spellcheck: "false", "aria-describedby": `${ident}-help` };
    if (spec.required) common["aria-required"] = "true";
    if (spec.control === "check") return make("input", { ...common, type: "checkbox" });
    if (spec.control === "select") {
      const node = make("select", common);
      if (spec.optional) node.append(make("option", { value: "", text: "none" }));
      node.append(...spec.choices.map((choice) => make("option", { value: choice, text: choice })));
      return node;
    }
    if (spec.control === "lines" || spec.control === "area" || spec.control === "prompts") {
      const rows = spec.control === "lines" ? "2" : "3";
      return make("textarea", { ...common, rows, placeholder: spec.control === "lines" ? "one a line" : null });
    }
    const node = make("input", { ...common, type: "text" });
    if (spec.control === "number") node.inputMode = /^-?\d+$/.test(spec.default) ? "numeric" : "decimal";
    if (spec.optional) node.placeholder = "none";
    if (spec.control === "numbers") node.placeholder = "numbers with spaces between them";
    if (spec.suggestions) node.setAttribute("list", `${ident}-list`);
    return node;
  }

  function shownDefault(spec) {
    if (spec.control === "check") return spec.default ? "on" : "off";
    if (spec.default === " ") return "a space";
    return spec.default === "" ? (spec.optional ? "none" : "empty") : spec.default.replace(/\n/g, ", ");
  }

  function drawControl(spec) {
    const node = input(spec);
    const isCheck = spec.control === "check";
    const wide = ["area", "lines", "prompts", "start", "gpus"].includes(spec.control) || (spec.group === "Basics" && spec.control === "text");
    const told = spec.required ? "required" : spec.unless ? `required, unless ${spec.unless} is given` : `default ${shownDefault(spec)}`;
    const facts = [spec.range, told].filter(Boolean).join(" · ");
    const help = make("p", { class: "kl-help", id: `${id(spec.name)}-help` }, ...rich(`${spec.help} `), make("span", { class: "kl-facts", text: facts }));
    const error = make("p", { class: "kl-error", id: `${id(spec.name)}-error`, hidden: true });
    const reset = make("button", {
      type: "button", class: "kl-reset", hidden: true, text: "reset", "aria-label": `Reset ${spec.label} to ${shownDefault(spec)}`,
      onclick: () => {
        set(spec.default);
        edit(spec, spec.default);
        control.focus();
      },
    });
    const label = make("label", { for: id(spec.name), text: spec.label });
    const head = make("div", { class: "kl-head" }, isCheck ? node : null, label, make("code", { text: spec.name }), reset);
    const body = isCheck ? null : make("div", { class: "kl-control" }, node, spec.unit ? make("span", { class: "kl-unit", text: spec.unit }) : null);
    if (spec.suggestions) {
      body.append(make("datalist", { id: `${id(spec.name)}-list` }, ...spec.suggestions.map((text) => make("option", { value: text }))));
    }
    const owner = isGuest(spec) && ownerOf(spec);
    const guest = owner && make("p", { class: "kl-note kl-guest", text: `An option of ${owner.label}, shown because it is set and takes effect.` });
    const idle = spec.needs && make("p", { class: "kl-note", hidden: true });
    const root = make("div", { class: `kl-field${wide ? " kl-wide" : ""}`, "data-name": spec.name }, head, guest || null, idle || null, body, error, help);
    const read = () => (isCheck ? node.checked : node.value);

    function set(text) {
      if (isCheck) {
        node.checked = text === true;
      } else if (node.value !== text) {
        // A value that the list does not have (an old file) is shown as it is, so that the error has something to point at.
        if (spec.control === "select" && ![...node.options].some((option) => option.value === text)) node.append(make("option", { value: text, text }));
        node.value = text;
      }
      if (control.editor) control.editor.set(text);
      control.mark();
    }
    const control = {
      root, node, set, error, spec,
      focus: () => (control.editor ? control.editor.focus() : node.focus({ preventScroll: true })),
      mark() {
        const changed = isChanged(spec);
        root.classList.toggle("kl-changed", changed);
        reset.hidden = !changed || spec.required === true;
      },
      explain() {
        if (!spec.needs) return;
        const missing = hindrance(spec);
        root.classList.toggle("kl-asleep", missing !== null);
        idle.hidden = missing === null;
        idle.textContent = missing ? `Has no effect until ${condition(missing)}.` : "";
      },
    };
    node.addEventListener(isCheck || spec.control === "select" ? "change" : "input", () => edit(spec, read()));
    // A decimal comma is shown as it is taken; see form.py.
    if (spec.control === "number") {
      node.addEventListener("change", () => {
        if (!DECIMAL_COMMA.test(node.value) || THOUSANDS.test(node.value)) return;
        node.value = node.value.trim().replace(",", ".");
        edit(spec, node.value);
      });
    }
    controls.set(spec.name, control);
    if (special[spec.control]) control.editor = special[spec.control]({ spec, node, head, body, label, write: (text) => { node.value = text; edit(spec, text); } });
    set(drafts[run][spec.name]);
    return root;
  }

  function showProblem(name) {
    const control = controls.get(name);
    if (!control) return;
    const sentences = problems.get(name) || [];
    const { node, error, root, spec } = control;
    const mark = control.editor ? control.editor.marked : node;
    error.hidden = sentences.length === 0;
    // The name and the help stand beside it already.
    error.textContent = sentences.map((text) => (text === `${name} is missing: ${spec.help}` ? "This is required." : text.replace(`${name}: `, ""))).join(" ");
    root.classList.toggle("kl-wrong", sentences.length > 0);
    if (sentences.length && mark === node) node.setAttribute("aria-invalid", "true");
    else node.removeAttribute("aria-invalid");
    mark.setAttribute("aria-describedby", sentences.length ? `${id(name)}-error ${id(name)}-help` : `${id(name)}-help`);
  }

  // ---- one group

  // Blocks of fields as they stand in an accordion: what the way puts first, then section by section.
  function ordered(title) {
    const blocks = blocksIn(title).map(({ about, fields }) => ({ about, specs: specsOf({ fields }).filter(isShown) }));
    const leading = way.first.map((name) => blocks.flatMap((block) => block.specs).find((spec) => spec.name === name)).filter(Boolean);
    if (title === "Basics" || !leading.length) return blocks.filter((block) => block.specs.length);
    const rest = blocks.map(({ about, specs }) => ({ about, specs: specs.filter((spec) => !leading.includes(spec)) }));
    return [{ about: way.title, specs: leading, leads: true }, ...rest].filter((block) => block.specs.length);
  }

  // What is built of a view is noted in it: areas are {specs, more}, folds, which hide some of them, {specs, fold, count, opened}.
  function drawBlocks(view, blocks) {
    return blocks.map(({ about, specs }) => {
      const folds = [...new Set(specs.map((spec) => spec.fold).filter(Boolean))];
      return make("div", { class: "kl-block" }, blocks.length > 1 ? make("h3", { class: "kl-about", text: about }) : null,
        ...drawFields(view, specs.filter((spec) => !spec.fold)), ...folds.map((title) => drawFold(view, title, specs.filter((spec) => spec.fold === title))));
    });
  }

  // Fields, and a button for each condition that some of them wait for.
  function drawFields(view, specs) {
    const more = make("div", { class: "kl-waiting" });
    view.areas.push({ specs, more });
    return [make("div", { class: "kl-grid" }, ...specs.map(drawControl)), more];
  }

  function drawFold(view, title, specs) {
    const count = make("span", { class: "kl-facts" });
    const fold = make("details", { class: "kl-fold" }, make("summary", {}, make("span", { text: title }), count), ...drawFields(view, specs));
    view.folds.push({ specs, fold, count, opened: null });
    return fold;
  }

  function countFolds(view) {
    for (const { specs, count } of view.folds) {
      const changed = specs.filter(isChanged).length;
      count.textContent = changed ? `${changed} changed` : plural(specs.length, "setting", "settings");
    }
  }

  // Shows and leaves out what is built of a group: what a search finds, or else what has an effect.
  function tidy(view) {
    const active = isSifting();
    for (const { specs, more } of view.areas) {
      const waiting = new Map();
      for (const spec of specs) {
        const control = controls.get(spec.name);
        control.root.hidden = active ? !matches(spec) : isIdle(spec);
        control.explain();
        if (!control.root.hidden || active) continue;
        const text = condition(hindrance(spec));
        waiting.set(text, [...(waiting.get(text) || []), spec]);
      }
      more.replaceChildren(...[...waiting].map(([text, idle]) => make("button", {
        type: "button", class: "kl-quiet", text: `Show ${plural(idle.length, "more setting", "more settings")}, for when ${text}`,
        onclick: () => {
          idle.forEach((spec) => wanted.add(spec.name));
          tidy(view);
          controls.get(idle[0].name).focus();
        },
      })));
    }
    countFolds(view);
    for (const each of view.folds) {
      const shown = each.specs.filter((spec) => !controls.get(spec.name).root.hidden);
      const wrong = each.specs.some((spec) => problems.has(spec.name));
      each.fold.hidden = active && !shown.length;
      if (active && each.opened === null) each.opened = each.fold.open;
      if (active) each.fold.open = shown.length > 0;
      else if (each.opened !== null) each.fold.open = each.opened;
      if (!active) each.opened = null;
      if (wrong) each.fold.open = true;
    }
  }

  parts.fieldset = ({ root, props, detail: title }) => {
    const basics = title === "Basics";
    const view = { title, props, details: null, built: false, specs: [], areas: [], folds: [], draw, count() {}, build() {}, unfold() {}, isStale };
    views.set(title, view);
    let drawn = null;

    function isStale() {
      const now = fieldsIn(title).filter(isShown);
      return now.length !== view.specs.length || now.some((spec) => !view.specs.includes(spec));
    }

    function draw() {
      const wasOpen = drawn === `${run} ${way.name}` && view.details && view.details.open;
      drawn = `${run} ${way.name}`;
      // An option may stand in another group now, whose control is drawn already.
      for (const spec of view.specs) if (controls.has(spec.name) && root.contains(controls.get(spec.name).root)) controls.delete(spec.name);
      root.replaceChildren();
      view.built = false;
      view.areas = [];
      view.folds = [];
      view.details = null;
      view.count = view.build = view.unfold = () => {};
      const blocks = ordered(title);
      const specs = (view.specs = blocks.flatMap((block) => block.specs));
      root.hidden = specs.length === 0;
      if (!specs.length) return;
      const body = make("div", { class: "kl-body" });
      view.build = () => {
        if (view.built) return;
        view.built = true;
        fillBody();
        for (const spec of specs) showProblem(spec.name);
        tidy(view);
      };
      const fillBody = () => {
        const [first, ...rest] = drawBlocks(view, blocks);
        body.append(first);
        if (!rest.length) return;
        const others = make("div", { class: "kl-rest" }, ...rest);
        body.append(others);
        if (!blocks[0].leads) return;
        const count = blocks.slice(1).reduce((sum, block) => sum + block.specs.length, 0);
        const more = make("button", { type: "button", class: "kl-quiet kl-unfold", text: `Show the other ${count} settings of ${title}` });
        more.addEventListener("click", () => {
          view.unfold();
          others.querySelector("input, select, textarea").focus();
        });
        body.insertBefore(more, others);
        body.classList.add("kl-folded");
      };
      view.unfold = () => body.classList.remove("kl-folded");
      if (basics) {
        root.append(make("section", { class: "kl-card kl-basics", "aria-labelledby": "kl-basics" }, make("h2", { id: "kl-basics", text: "Basics" }), body));
        view.build();
        return;
      }
      const badge = make("span", { class: "kl-badge" });
      const heading = make("h2", { class: "kl-title", text: title });
      const names = specs.slice(0, 4).map((spec) => spec.label.replace(/^[A-Z](?![A-Z])/, (letter) => letter.toLowerCase())).join(", ");
      const hint = make("span", { class: "kl-hint", text: `${names} … ${specs.length} settings` });
      view.details = make("details", { class: "kl-card kl-section" }, make("summary", {}, heading, hint, badge), body);
      // A click comes before the browser opens it, the toggle event a moment after: somebody tabbing on at once must find the fields.
      view.details.firstChild.addEventListener("click", () => view.build());
      view.details.addEventListener("toggle", () => {
        if (view.details.open) view.build();
      });
      view.count = () => {
        const changed = specs.filter(isChanged).length;
        const wrong = specs.filter((spec) => problems.has(spec.name)).length;
        badge.textContent = [wrong ? plural(wrong, "problem", "problems") : "", changed ? `${changed} changed` : ""].filter(Boolean).join(" · ");
        badge.classList.toggle("kl-wrong", wrong > 0);
        hint.hidden = changed + wrong > 0;
      };
      root.append(view.details);
      if (wasOpen || (way.opens && blocks[0].leads)) {
        view.build();
        view.details.open = true;
      }
      view.count();
    }
    draw();
    publish(view);
  };

  // ---- search, filter, open and close

  const isSifting = () => filter.words.length > 0 || filter.changed;

  function applyFilter() {
    const active = isSifting();
    if (active && !filter.opened) filter.opened = new Map([...views].map(([title, view]) => [title, Boolean(view.details && view.details.open)]));
    let total = 0;
    const elsewhere = filter.words.length ? fieldsOf(run).filter((spec) => !isShown(spec) && ownerOf(spec) && matches(spec)) : [];
    for (const view of views.values()) {
      const { title, specs } = view;
      const found = new Set(specs.filter((spec) => matches(spec)).map((spec) => spec.name));
      total += found.size;
      if (active && found.size) view.build();
      if (view.details) {
        view.details.hidden = active && !found.size;
        view.details.open = active ? found.size > 0 : filter.opened ? filter.opened.get(title) === true : view.details.open;
      }
      tidy(view);
    }
    if (!active) filter.opened = null;
    document.body.classList.toggle("kl-sifting", active);
    document.querySelectorAll(".kl-fieldset .kl-about").forEach((heading) => {
      heading.hidden = active && ![...heading.parentElement.querySelectorAll(".kl-field")].some((field) => !field.hidden);
    });
    return { active, total, elsewhere };
  }

  function matches(spec) {
    if (filter.changed && !isChanged(spec)) return false;
    const text = `${spec.name} ${spec.name.replace(/_/g, " ")} ${spec.label} ${spec.help} ${spec.group}`.toLowerCase();
    return filter.words.every((word) => text.includes(word));
  }

  parts.toolbar = ({ root }) => {
    const status = make("p", { class: "kl-status", role: "status" });
    const search = make("input", { type: "search", id: "kl-search", placeholder: "Search all settings", "aria-label": "Search all settings", autocomplete: "off" });
    const changed = make("input", { type: "checkbox", id: "kl-only-changed" });
    const update = () => {
      filter.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      filter.changed = changed.checked;
      const { active, total, elsewhere } = applyFilter();
      const found = total ? plural(total, "setting", "settings") : elsewhere.length ? "" : "No setting matches; try another word";
      const more = elsewhere.map((spec) => `${spec.name} belongs to ${ownerOf(spec).label}`).join(", ");
      status.textContent = active ? [found, more].filter(Boolean).join("; ") : "";
    };
    const all = (open) => () => {
      for (const view of views.values()) {
        if (!view.details || view.details.hidden) continue;
        if (open) view.build();
        view.details.open = open;
        view.unfold();
        for (const { fold } of view.folds) fold.open = open;
      }
    };
    search.addEventListener("input", update);
    changed.addEventListener("change", update);
    filter.clear = () => {
      search.value = "";
      changed.checked = false;
      update();
    };
    root.append(make("div", { class: "kl-toolbar", role: "search" }, search,
      make("label", { class: "kl-toggle" }, changed, make("span", { text: "Only changed" })),
      make("button", { type: "button", class: "kl-quiet", text: "Open all", onclick: all(true) }),
      make("button", { type: "button", class: "kl-quiet", text: "Close all", onclick: all(false) })), status);
  };

  function goTo(name) {
    const spec = fieldsOf(run).find((item) => item.name === name);
    const view = spec && views.get(spec.group);
    if (!view) return false;
    wanted.add(name);
    if (view.isStale()) view.draw();
    view.build();
    if (view.details) view.details.open = true;
    applyFilter();
    let control = controls.get(name);
    if (control.root.closest(".kl-rest")) view.unfold();
    const fold = control.root.closest(".kl-fold");
    if (fold) fold.open = true;
    if (control.root.hidden || (view.details && view.details.hidden)) {
      filter.clear();
      if (view.details) view.details.open = true;
      control = controls.get(name);
    }
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    control.root.scrollIntoView({ block: "center", behavior: still ? "auto" : "smooth" });
    control.focus();
    return true;
  }

  restore();
  kl.form = {
    schema, parts, views, controls, drafts, problems, special, make, rich, plural, store, stored,
    fill, goTo, choose, fieldsOf, groupsOf, specsOf, familyOf, keyOf, showMore, shownDefault, showProblem, input, DRAFT, SEEN,
    run: () => run,
    way: () => way,
    onChange: (listen) => listeners.push(listen),
  };
})();
