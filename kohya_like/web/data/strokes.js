// What was drawn on a mask, as a list of steps that is drawn again for Undo: a picture for each would take 16 MB.

/**
 * @typedef {{kind: "stroke", counts: boolean, size: number, points: number[][]} | {kind: "all" | "nothing" | "invert"}} Step
 */

// What counts is free and what does not is tinted, so that the canvas is what somebody sees: opacity is what is left out.
const TINT = "#e0245e";

export function makeStrokes() {
  /** @type {Step[]} */
  let done = [];
  /** @type {Step[]} */
  let undone = [];
  let saved = 0; // how many of them are on the disk
  return {
    steps: () => done,
    add(step) {
      // What was taken back and saved before cannot be reached again.
      if (saved > done.length) saved = -1;
      done.push(step);
      undone = [];
      return step;
    },
    undo() {
      const step = done.pop();
      if (step) undone.push(step);
      return Boolean(step);
    },
    redo() {
      const step = undone.pop();
      if (step) done.push(step);
      return Boolean(step);
    },
    canUndo: () => done.length > 0,
    canRedo: () => undone.length > 0,
    isSaved: () => saved === done.length,
    save: () => (saved = done.length),
    clear() {
      done = [];
      undone = [];
      saved = 0;
    },
  };
}

/**
 * Draws a step, from its point number `from` on.
 * @param {CanvasRenderingContext2D} context
 * @param {Step} step
 */
export function drawStep(context, step, from = 0) {
  const { width, height } = context.canvas;
  context.save();
  if (step.kind === "stroke") {
    context.globalCompositeOperation = step.counts ? "destination-out" : "source-over";
    context.strokeStyle = context.fillStyle = TINT;
    context.lineWidth = step.size;
    context.lineCap = context.lineJoin = "round";
    context.beginPath();
    const [first, ...rest] = step.points.slice(Math.max(0, from - 1));
    context.moveTo(first[0], first[1]);
    for (const [x, y] of rest.length ? rest : [first]) context.lineTo(x, y);
    context.stroke();
  } else if (step.kind === "all") {
    context.clearRect(0, 0, width, height);
  } else {
    // "xor" of a full sheet turns each opacity to what it lacks.
    context.globalCompositeOperation = step.kind === "invert" ? "xor" : "source-over";
    context.fillStyle = TINT;
    context.fillRect(0, 0, width, height);
  }
  context.restore();
}

/**
 * The canvas, tinted where a picture of a mask is dark; all of it without one.
 * @param {CanvasRenderingContext2D} context
 * @param {ImageBitmap | null} mask
 */
export function drawMask(context, mask) {
  const { width, height } = context.canvas;
  context.clearRect(0, 0, width, height);
  if (!mask) {
    drawStep(context, { kind: "nothing" });
    return;
  }
  context.drawImage(mask, 0, 0, width, height);
  const pixels = context.getImageData(0, 0, width, height);
  asTint(pixels.data);
  context.putImageData(pixels, 0, 0);
}

/** Greys (r, g, b, 255) become the tint with the opacity that they lack. */
export function asTint(data) {
  for (let place = 0; place < data.length; place += 4) {
    const left = 255 - data[place];
    data[place] = 0xe0;
    data[place + 1] = 0x24;
    data[place + 2] = 0x5e;
    data[place + 3] = left;
  }
}

/** And back: what the tint leaves free, as opaque greys. */
export function asGrey(data) {
  for (let place = 0; place < data.length; place += 4) {
    data[place] = data[place + 1] = data[place + 2] = 255 - data[place + 3];
    data[place + 3] = 255;
  }
}
