// A grid of many images of which only those in sight are drawn: 10,000 cost what 60 cost. Moved through with the arrow keys.

import { make } from "../common/page.js";

const GAP = 8;
const LEAST_WIDTH = 152; // so that a telephone has two columns
const SPARE_ROWS = 2;

/**
 * @param {{label: string, cell: (index: number) => HTMLElement, choose: (index: number) => void, pressed: () => void}} options cell draws an item; choose is
 *   told the active one, pressed that it was chosen with the mouse or a finger
 */
export function makeGrid({ label, cell, choose, pressed }) {
  const space = make("div", { class: "kl-data-space", role: "presentation" });
  const root = make("div", { class: "kl-data-grid", role: "listbox", tabindex: "0", "aria-label": label }, space);
  let shown = []; // indices of items, in their order
  let active = -1; // place among them
  let width = LEAST_WIDTH; // of a cell, without the gap
  const height = 236;
  let columns = 1;
  let drawn = new Map(); // place -> element

  function layout() {
    columns = Math.max(1, Math.floor((root.clientWidth - GAP) / (LEAST_WIDTH + GAP)));
    width = Math.floor((root.clientWidth - GAP) / columns) - GAP;
    space.style.height = `${Math.ceil(shown.length / columns) * (height + GAP) + GAP}px`;
  }

  function draw() {
    const first = Math.max(0, Math.floor(root.scrollTop / (height + GAP)) - SPARE_ROWS) * columns;
    const last = Math.min(shown.length, (Math.ceil((root.scrollTop + root.clientHeight) / (height + GAP)) + SPARE_ROWS) * columns);
    for (const [place, node] of drawn) if (place < first || place >= last) node.remove();
    const now = new Map();
    let before = null; // they stand in the document in the order in which they are seen: some look at it in that order alone
    for (let place = first; place < last; place += 1) {
      const node = drawn.get(place) || make("div", { id: `kl-data-${shown[place]}`, class: "kl-data-cell", role: "option", "aria-setsize": shown.length, "aria-posinset": place + 1,
        onclick: () => { point(place); root.focus(); pressed(); } }, cell(shown[place]));
      node.setAttribute("aria-selected", String(place === active));
      node.style.cssText = `left:${GAP + (place % columns) * (width + GAP)}px;top:${GAP + Math.floor(place / columns) * (height + GAP)}px;width:${width}px;height:${height}px`;
      if (!node.isConnected) space.insertBefore(node, before ? before.nextSibling : space.firstChild);
      now.set(place, before = node);
    }
    drawn = now;
    const chosen = drawn.get(active);
    if (chosen) root.setAttribute("aria-activedescendant", chosen.id);
    else root.removeAttribute("aria-activedescendant");
  }

  function point(place, tells = true) {
    if (!shown.length) return;
    active = Math.min(Math.max(place, 0), shown.length - 1);
    const top = Math.floor(active / columns) * (height + GAP);
    if (top < root.scrollTop) root.scrollTop = top;
    else if (top + height + 2 * GAP > root.scrollTop + root.clientHeight) root.scrollTop = top + height + 2 * GAP - root.clientHeight;
    draw();
    if (tells) choose(shown[active]);
  }

  const page = () => Math.max(1, Math.floor(root.clientHeight / (height + GAP))) * columns;
  const steps = { ArrowRight: () => 1, ArrowLeft: () => -1, ArrowDown: () => columns, ArrowUp: () => -columns, PageDown: page, PageUp: () => -page(), Home: () => -shown.length, End: () => shown.length };
  root.addEventListener("keydown", (event) => {
    if (!(event.key in steps)) return;
    event.preventDefault();
    point(active < 0 ? 0 : active + steps[event.key]());
  });
  root.addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(() => {
    layout();
    draw();
  }).observe(root);

  function clear() {
    for (const node of drawn.values()) node.remove();
    drawn = new Map();
  }

  return {
    root,
    show(indices, keep) {
      shown = indices;
      active = keep === undefined ? -1 : indices.indexOf(keep);
      clear();
      layout();
      draw();
    },
    redraw(indices) {
      for (const [place, node] of drawn) {
        if (indices && !indices.includes(shown[place])) continue;
        node.remove();
        drawn.delete(place);
      }
      draw();
    },
    step: (by) => point(active + by),
  };
}
