// How numbers, sizes and times are written.

import { language, listed, plural, t, translated } from "./language.js";

export function figure(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return Number(value.toPrecision(digits)).toString();
}

// A count with its thousands apart. Of fractions every language has the point, as fields and files have it, so none has it between thousands.
export const grouped = (value, digits = 3) => value.toLocaleString("en", { maximumFractionDigits: digits }).replace(/,/g, ["de", "ru"].includes(language) ? "\u202f" : ",");

// What a sweep tries with a run.
export function triedWords({ settings, own }) {
  const said = listed(settings.map(([label, value]) => `${translated(label)} ${translated(value)}`));
  return said && own ? t`${said} (as in the form)` : said;
}

// What a run is called beside the name of its folder: by somebody, otherwise by what a sweep tries with it; "" for a run of neither.
export const calledWords = ({ label, tried }) => label || triedWords(tried);

// A sweep marks its runs with a tag.
export const tagWords = (tag) => tag.replace(/^sweep (\S+)$/, (_all, name) => t`sweep ${name}`);

// When a run was started, null where the name of its folder does not tell, and what it is called there.
export function nameParts(name) {
  const [, year, month, day, hour, minute, second, rest = name] = /^(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)(?:_\d+)?-(.*)$/.exec(name) || [];
  return { started: year ? new Date(+year, +month - 1, +day, +hour, +minute, +second) : null, rest };
}

// A run as lists name it: by what it is called, and when it was started.
export function runWords(name, called) {
  const { started, rest } = nameParts(name);
  return [calledWords(called) || rest, started && moment(started)].filter(Boolean).join(" · ");
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return t`${seconds > 0 && seconds < 0.95 ? figure(seconds, 1) : whole} s`;
  const minutes = Math.round(whole / 60);
  if (minutes < 60) return t`${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? t`${hours} h ${minutes % 60} min` : t`${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit && count < 999.5 ? count.toPrecision(3) : Math.round(count)} ${units[unit]}`;
}

export { plural };

// A time of this day; when: a Date, or milliseconds.
export const clock = (when) => new Date(when).toLocaleTimeString(language === "en" ? undefined : language);

// Day and time as they are written where the reader lives, with the year where it is another one. when: a Date, or milliseconds.
export function moment(when) {
  const date = new Date(when);
  const year = date.getFullYear() === new Date().getFullYear() ? undefined : "numeric";
  return date.toLocaleString(language === "en" ? undefined : language, { year, day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}
