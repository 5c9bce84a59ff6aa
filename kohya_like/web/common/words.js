// How numbers, sizes and times are written.

import { language, plural, t } from "./language.js";

export function figure(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return Number(value.toPrecision(digits)).toString();
}

// A count with its thousands apart. Of fractions every language has the point, as fields and files have it, so none has it between thousands.
export const grouped = (value, digits = 3) => value.toLocaleString("en", { maximumFractionDigits: digits }).replace(/,/g, ["de", "ru"].includes(language) ? "\u202f" : ",");

// A run as lists name it: by what somebody calls it, and when it was started.
export const runWords = (name, called = "") => name.replace(/^(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)\d\d(_\d+)?-(.*)$/, (_all, year, month, day, hour, minute, _more, rest) => `${called || rest} · ${year}-${month}-${day} ${hour}:${minute}`);

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return t`${whole} s`;
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

// Day and time as they are written where the reader lives. when: a Date, or milliseconds.
export const moment = (when) => new Date(when).toLocaleString(language === "en" ? undefined : language, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
