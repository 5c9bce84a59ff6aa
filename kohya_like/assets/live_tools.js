// Small things that every part of the live view uses, and how it talks with the studio. Text of runs only ever enters the page
// through textContent.
(() => {
  "use strict";
  const kl = (window.kl = window.kl || {});
  if (kl.live) return;

  const TINY_PIXELS = 256;

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

  function say(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  function figure(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    return Number(value.toPrecision(digits)).toString();
  }

  function duration(seconds) {
    const whole = Math.max(0, Math.round(seconds));
    if (whole < 60) return `${whole} s`;
    const minutes = Math.round(whole / 60);
    if (minutes < 60) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  }

  function bytes(count) {
    const units = ["B", "KiB", "MiB", "GiB"];
    let unit = 0;
    while (count >= 1024 && unit < 3) {
      count /= 1024;
      unit += 1;
    }
    return `${unit ? count.toPrecision(3) : count} ${units[unit]}`;
  }

  // Into sight. On a narrow screen what follows belongs to it: a run, pictures.
  function bring(node) {
    node.scrollIntoView({ block: matchMedia("(max-width: 999px)").matches ? "start" : "nearest" });
  }

  // A small picture that is shown larger has sharp pixels, each a whole number of the screen's. frame: what takes its width; the picture
  // itself where both its sides are free.
  function sharp(image, frame = image) {
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
      room.observe(frame.parentElement);
      fit();
    });
    return image;
  }

  // ---- talking to the studio

  const address = (run, rest = "") => `/kl/run/${encodeURIComponent(run)}${rest}`;
  const withToken = (path, more = "") => `${path}?token=${encodeURIComponent(kl.token || "")}${more}`;

  class Refused extends Error {
    constructor(status, sentence) {
      super(sentence);
      this.status = status;
    }
  }

  async function ask(path, options = {}) {
    const response = await fetch(path, { ...options, headers: { "x-kl-token": kl.token || "" }, cache: "no-store" });
    if (response.status === 401) reloadOnce();
    const answer = await response.json();
    if (!response.ok) throw new Refused(response.status, answer.detail || `The studio answered ${response.status}.`);
    return answer;
  }

  // A studio that was started again has a new token, and only a fresh page has it.
  function reloadOnce() {
    const before = Number(sessionStorage.getItem("kl.reloaded") || 0);
    if (Date.now() - before < 15000) return;
    sessionStorage.setItem("kl.reloaded", String(Date.now()));
    location.reload();
  }

  function seen(node) {
    return node.isConnected && node.offsetParent !== null && !document.hidden;
  }

  // Calls `work` again and again; it returns the seconds until the next time. Nothing is asked while the node cannot be seen.
  function repeat(node, work) {
    let timer = null;
    let busy = false;
    async function turn() {
      clearTimeout(timer);
      if (busy) return;
      let pause = 0.5;
      if (seen(node)) {
        busy = true;
        try {
          pause = await work();
        } finally {
          busy = false;
        }
      }
      timer = setTimeout(turn, 1000 * pause);
    }
    document.addEventListener("visibilitychange", () => !document.hidden && turn());
    turn();
    return turn;
  }

  kl.tools = { make, say, bring, sharp, figure, duration, bytes, address, withToken, ask, repeat, Refused };
})();
