// Small things that all parts of the page use. Text of options, of runs and of people only ever enters the page through textContent.

import { t } from "./language.js";

const TINY_PIXELS = 256;

/**
 * An element with its attributes: text is what it says, onNAME is what it does at an event, and none of null, undefined and false is set.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, any>} attributes
 * @param {...(Node | string | null | undefined)} children those that are null or undefined are left out
 * @returns {HTMLElementTagNameMap[T]}
 */
export function make(tag, attributes = {}, ...children) {
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

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Names in help texts stand between backticks. Flags such as --w are not broken behind a hyphen.
export function rich(text) {
  const flags = (piece) => piece.split(/(--\w+)/).map((part, index) => (index % 2 ? make("span", { class: "kl-whole", text: part }) : document.createTextNode(part)));
  return text.split("`").flatMap((piece, index) => (index % 2 ? [make("code", { text: piece })] : flags(piece)));
}

/**
 * The first element inside of another that a selector finds.
 * @param {ParentNode} root
 * @param {string} selector
 * @returns {HTMLElement}
 */
export const find = (root, selector) => root.querySelector(selector);

/**
 * All of them.
 * @param {ParentNode} root
 * @param {string} selector
 * @returns {HTMLElement[]}
 */
export const findAll = (root, selector) => [.../** @type {NodeListOf<HTMLElement>} */ (root.querySelectorAll(selector))];

// Into sight. On a narrow screen what follows belongs to it: a run, images.
export function bring(node) {
  node.scrollIntoView({ block: matchMedia("(max-width: 999px)").matches ? "start" : "nearest" });
}

// A small image that is shown larger has sharp pixels, each a whole number of the screen's. frame: what takes its width; the image
// itself where both its sides are free.
export function sharp(image, frame = image) {
  const room = new ResizeObserver(fit);
  function fit() {
    const own = image.naturalWidth;
    if (!own || image.offsetParent === null) return;
    frame.style.width = "";
    if (frame === image) image.style.height = "";
    const { width, height } = image.getBoundingClientRect();
    const scale = Math.min(width / own, height / image.naturalHeight);
    const times = Math.floor(scale * devicePixelRatio + 0.01) / devicePixelRatio;
    const isTiny = own < TINY_PIXELS && times > 0;
    image.classList.toggle("kl-tiny", isTiny);
    if (!isTiny) return;
    if (frame === image) image.style.height = `${image.naturalHeight * times}px`;
    frame.style.width = `${frame === image ? own * times : frame.offsetWidth - width + (width * times) / scale}px`;
  }
  image.addEventListener("load", () => {
    room.disconnect();
    // It may have left the page before it was there.
    if (!frame.parentElement) return;
    room.observe(frame.parentElement);
    fit();
  });
  return image;
}

export function copier(text, label) {
  const button = make("button", { type: "button", class: "kl-quiet", text: t`Copy`, "aria-label": label });
  button.addEventListener("click", async () => {
    // navigator.clipboard exists only on https and on localhost.
    if (navigator.clipboard && window.isSecureContext) await navigator.clipboard.writeText(text());
    else copyBySelection(text());
    button.textContent = t`Copied`;
    setTimeout(() => (button.textContent = t`Copy`), 1500);
  });
  return button;
}

function copyBySelection(text) {
  const area = make("textarea", { class: "kl-offscreen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  const link = make("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
