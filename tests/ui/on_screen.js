// Looks at a page as a person does; on_screen.py asks it.
window.sight ||= (() => {
  const COLUMNS = ".kl-main, .kl-side, .kr-nav, .kr-detail, .kl-tool-form, .kl-tool-side, .kl-inf-form, .gradio-container";
  const MARGIN = 12; // pixels from the edge of a box to its inner corners, which may be round
  const BUTTONS = "button, [role=button], [role=tab], summary, label.kl-button, label.kl-option:not(:has(:disabled)), "
    + "a.kl-button, a.kr-button, .kr-files a";
  const round = (box) => [box.left, box.top, box.right, box.bottom].map(Math.round).join(" ");
  const boxOf = (node) => [...node.getClientRects()].find((box) => box.width && box.height) || node.getBoundingClientRect();
  // A button that only the keyboard shows is clipped away.
  const isSeen = (node) => node.checkVisibility({opacityProperty: true, visibilityProperty: true})
    && boxOf(node).width > 0 && getComputedStyle(node).clipPath === "none";
  const nameOf = (node) => (node.getAttribute("aria-label") || node.textContent).replace(/\s+/g, " ").trim();
  const scrollers = (node) => {
    const found = [];
    for (let each = node.parentElement; each && each !== document.body; each = each.parentElement)
      if (/auto|scroll/.test(getComputedStyle(each).overflowY)) found.push(each);
    return found;
  };

  // Scrolls up and down as a person can, until a point of a node, told as shares of its box with a margin, is as near to the middle of the
  // window as it comes; gives the point.
  function bring(node, across, down) {
    const point = () => {
      const box = boxOf(node), within = (from, to, share) => {
        const margin = Math.min(MARGIN, (to - from) / 4);
        return from + margin + share * (to - from - 2 * margin);
      };
      return [within(box.left, box.right, across), within(box.top, box.bottom, down)];
    };
    for (const each of scrollers(node)) {
      each.scrollLeft = 0;
      const box = each.getBoundingClientRect(), y = point()[1];
      if (y < box.top + 2 || y > box.bottom - 2) each.scrollTop += y - (box.top + box.bottom) / 2;
    }
    scrollTo(0, scrollY + point()[1] - innerHeight / 2);
    return point();
  }

  function hit(node, [x, y]) {
    if (x < 0 || y < 0 || x > innerWidth || y > innerHeight) return `lies outside of the window at ${Math.round(x)} ${Math.round(y)}`;
    const above = document.elementFromPoint(x, y);
    if (node.contains(above)) return "";
    return `is covered at ${Math.round(x)} ${Math.round(y)} by ${above ? above.outerHTML.slice(0, 80) : "nothing"}`;
  }

  function look(node) {
    if (!isSeen(node)) return ["is hidden"];
    const said = [];
    const box = boxOf(node), column = node.parentElement.closest(COLUMNS), frame = column.getBoundingClientRect();
    if (box.left < frame.left - 1 || box.right > frame.right + 1) said.push(`stands out of its column: ${round(box)} of ${round(frame)}`);
    for (const [across, down] of [[0.5, 0.5], [0, 0], [1, 0], [0, 1], [1, 1]]) {
      const fault = hit(node, bring(node, across, down));
      if (fault) said.push(fault);
    }
    return [...new Set(said)];
  }

  // Without any scrolling: the middle of the upper edge.
  function lookAtOnce(node) {
    const box = boxOf(node);
    const fault = isSeen(node) ? hit(node, [(box.left + box.right) / 2, box.top + Math.min(MARGIN, box.height / 2)]) : "is hidden";
    return fault ? [`${fault} before anybody scrolls`] : [];
  }

  // Asks again and again for an answer that is not null; after that time, for another.
  async function until(patience, ask, otherwise) {
    const end = performance.now() + patience;
    for (;;) {
      await new Promise((done) => requestAnimationFrame(done));
      const answer = ask();
      if (answer !== null || performance.now() > end) return answer === null ? otherwise() : answer;
      await new Promise((done) => setTimeout(done, 30));
    }
  }

  // Small images that are shown larger, but not with sharp pixels that are each a whole number of the screen's.
  function blurred() {
    return [...document.images].filter((image) => isSeen(image) && image.complete && image.naturalWidth < 256).flatMap((image) => {
      const style = getComputedStyle(image), {width, height} = image.getBoundingClientRect();
      const scales = [width / image.naturalWidth, height / image.naturalHeight].map((scale) => scale * devicePixelRatio);
      const scale = Math.min(...scales), whole = Math.round(scale);
      if (scale < 1 || (Math.abs(scale - whole) < 0.02 && (whole === 1 || style.imageRendering === "pixelated"))) return [];
      const name = `${image.className} "${image.alt.slice(0, 40)}"`;
      return [`${name} of ${image.naturalWidth} px, ${scale.toFixed(2)} times as large, ${style.imageRendering}`];
    });
  }

  const seen = (place) => [...document.querySelectorAll(BUTTONS)].filter((node) => isSeen(node) && (!place || node.closest(place)));
  // No heading without words, nothing of gradio's over a part, nothing wider than the window or cut off at its edge, no small image that is blurred.
  function flaws() {
    const empty = [...document.querySelectorAll("h1, h2, h3, h4")].filter((node) => isSeen(node) && !node.textContent.trim());
    const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    // What is cut off at the edge of the page makes nothing wider.
    const beyond = (node) => Math.round(boxOf(node).right - Math.min(innerWidth, node.closest(".gradio-container").getBoundingClientRect().right));
    const cut = [...document.querySelectorAll(".kl-card, .kr-run, .kl-dialog, .kl-badge, .kr-badge")].filter((node) => isSeen(node) && beyond(node) > 1);
    const said = empty.map((node) => `an empty heading: ${node.outerHTML.slice(0, 80)}`);
    const over = [...document.querySelectorAll(".block > [data-testid=status-tracker]")].filter((node) => getComputedStyle(node).display !== "none");
    if (over.length) said.push(`${over.length} parts have a counter of seconds over them`);
    said.push(...cut.map((node) => `${node.className} ends ${beyond(node)} px right of the page`));
    return [...said, ...(wide > 0 ? [`the page is ${wide} px wider than the window`] : []), ...blurred()];
  }
  return {
    flaws: (patience) => until(patience, () => (flaws().length ? null : []), flaws),
    names: () => [...new Set(seen("").map(nameOf))],
    // The middle of the first visible button of a name that lies open, for the mouse.
    async button(name, place, patience) {
      let fault = [`there is no button ${name} to see`];
      return until(patience, () => {
        for (const found of seen(place).filter((node) => new RegExp(`^(?:${name})$`).test(nameOf(node)) && !node.disabled)) {
          // Over a label lies the field for a file that it names.
          const whole = found.closest(".kl-upload") || found, point = bring(found, 0.5, 0.5), over = hit(whole, point);
          if (!over) {
            window.sight.clicked = false;
            whole.addEventListener("click", () => (window.sight.clicked = true), { once: true, capture: true });
            return point;
          }
          fault = [`${nameOf(found)} ${over}`];
        }
        return null;
      }, () => fault);
    },
    async thing(css, says, atOnce, patience) {
      const pattern = new RegExp(says);
      const find = () => [...document.querySelectorAll(css)].find((node) => isSeen(node) && pattern.test(node.textContent));
      let said = [];
      const judge = (look) => () => {
        const node = find();
        said = node ? look(node) : [`there is none to see (${css}${says && `, ${says}`})`];
        return said.length ? null : [];
      };
      const early = atOnce ? await until(patience, judge(lookAtOnce), () => said) : [];
      if (early.length && !find()) return early;
      return [...early, ...(await until(patience, judge(look), () => said))];
    },
  };
})();
