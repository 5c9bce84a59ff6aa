// What a process says, line by line, with its end in sight.

import { t } from "./language.js";
import { make, say } from "./page.js";

const MAX_LINES = 1500;

export class Console {
  constructor() {
    this.log = make("pre", { class: "kr-console", role: "log", "aria-label": t`Console`, "aria-live": "off", tabindex: 0 });
    this.open = make("div", { class: "kr-open" });
    this.log.append(this.open);
    this.root = make("details", { class: "kr-fold" }, make("summary", { text: t`Console` }), this.log);
    this.root.addEventListener("toggle", () => (this.log.scrollTop = this.log.scrollHeight));
  }

  update(chunk) {
    const bottom = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 24;
    if (chunk.reset) this.log.replaceChildren(this.open);
    if (chunk.lines.length) {
      const news = document.createDocumentFragment();
      for (const line of chunk.lines) news.append(make("div", { text: line || "\u00a0" }));
      this.open.before(news);
      while (this.log.children.length > MAX_LINES) this.log.firstChild.remove();
    }
    say(this.open, chunk.open);
    if (bottom) this.log.scrollTop = this.log.scrollHeight;
  }
}
