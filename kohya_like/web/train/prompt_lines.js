// Prompts as lines of kohya's text: read, changed and written again. A line that nobody edits keeps every character; an edited one keeps its
// flags in their order, unknown ones too.

// The ends of lines, and the blanks around words, are those of sd_scripts/schema/prompts.py, that is Python's.
const LINE = /([^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]*)(\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]|$)/gy;
const BLANK = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+";
const AROUND = new RegExp(`^${BLANK}|${BLANK}$`, "g");
const FILE = /\.(txt|toml|json)$/i;

export const strip = (text) => text.replace(AROUND, "");
export const isFile = (text) => !strip(text).includes("\n") && FILE.test(strip(text));

export function flagsOf(text) {
  return text.split(" --").slice(1).map((piece) => {
    const [name, ...rest] = strip(piece).split(" ");
    return { name, value: strip(rest.join(" ")) };
  });
}

// The lines of a text: {raw, end}, and for a prompt {prompt, flags} as well.
export function parse(text) {
  const lines = [];
  LINE.lastIndex = 0;
  while (LINE.lastIndex < text.length) {
    const [, raw, end] = LINE.exec(text);
    const line = strip(raw);
    const isPrompt = line !== "" && !line.startsWith("#");
    lines.push({ raw, end, ...(isPrompt ? { prompt: strip(` ${line}`.split(" --")[0]), flags: flagsOf(` ${line}`) } : {}) });
  }
  return lines;
}

export const written = (flags) => flags.map(({ name, value }) => ` --${name}${value ? ` ${value}` : ""}`).join("");
const lineOf = (line) => (line.edited ? line.prompt + written(line.flags) : line.raw);
export const serialise = (lines) => lines.map((line) => lineOf(line) + line.end).join("");

// Sets one flag of a prompt; an empty value takes it away.
export function setFlag(line, name, value) {
  const found = line.flags.find((flag) => flag.name === name);
  if (value === "") line.flags = line.flags.filter((flag) => flag !== found);
  else if (found) found.value = value;
  else line.flags.push({ name, value });
  line.edited = true;
}

export function setFurther(line, names, text) {
  const seen = new Set();
  const own = line.flags.filter(({ name }) => names.has(name) && !seen.has(name) && seen.add(name));
  line.flags = [...own, ...flagsOf(` ${text}`)];
  line.edited = true;
}
