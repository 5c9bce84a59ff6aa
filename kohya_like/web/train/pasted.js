// What a text that somebody pastes is.

// A command line, by the same signs as `looks_like` of sd_scripts/programs/command_lines.
const START = String.raw`^[ \t]*(?:\w+=\S+[ \t]+)*(?:python[\d.]*|accelerate|deepspeed|torchrun)[ \t]`;
const SCRIPT = new RegExp(String.raw`[\p{L}\p{N}_]\.py(?![\p{L}\p{N}_])|${START}(?:.*[ \t])?-m[ \t]+[\p{L}\p{N}_]`, "mu");
const OPTION = /(?:^|[\s"'(])--[A-Za-z]/;
const WITH_SETTINGS = new RegExp(String.raw`${START}.*\.(?:ya?ml|toml|json)\b`, "m");

// The name that a file of it would have; empty for what is neither settings nor a command line.
export function nameOfPasted(text) {
  if (/^\s*\{\s*"[^]*\}\s*$/.test(text)) return "pasted.json";
  if ((SCRIPT.test(text) && OPTION.test(text)) || WITH_SETTINGS.test(text)) return "pasted.txt";
  if ((text.match(/^[ \t]*(?:[\w.-]+[ \t]*=[ \t]*\S|\[\[?[\w.-]+\]\]?[ \t]*$)/gm) ?? []).length > 1) return "pasted.toml";
  return /^[\w-]+:[ \t]*\r?\n[ \t]+[\w-]+:/m.test(text) ? "pasted.yaml" : "";
}
