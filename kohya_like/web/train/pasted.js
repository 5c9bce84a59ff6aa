// What a text that somebody pastes is.

const LINE = /\.py\b[^]*--[A-Za-z]|^[ \t]*(?:\w+=\S+[ \t]+)*(?:python[\d.]*|accelerate|deepspeed|torchrun)[ \t].*\.(?:ya?ml|toml|json)\b/m;

// The name that a file of it would have; empty for what is neither settings nor a command line.
export function nameOfPasted(text) {
  if (LINE.test(text)) return "pasted.txt";
  if (/^\s*\{[^]*\}\s*$/.test(text)) return "pasted.json";
  if ((text.match(/^[ \t]*(?:[\w.-]+[ \t]*=[ \t]*\S|\[\[?[\w.-]+\]\]?[ \t]*$)/gm) ?? []).length > 1) return "pasted.toml";
  return /^[\w-]+:[ \t]*\r?\n[ \t]+[\w-]+:/m.test(text) ? "pasted.yaml" : "";
}
