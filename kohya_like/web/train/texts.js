// What the text in a control means, as kohya_like/form.py takes it.

const DECIMAL_COMMA = /^\s*[-+]?\d*,\d+(e[-+]?\d+)?\s*$/i;
const THOUSANDS = /^\s*[-+]?0*[1-9]\d*,\d{3}\s*$/;

// A number with a decimal comma as one with a point. A comma that may part thousands stays, to be asked about.
export const withPoint = (text) => (DECIMAL_COMMA.test(text) && !THOUSANDS.test(text) ? text.trim().replace(",", ".") : text);

// The same of numbers with spaces between them. A single one with a comma may be two, and a list with commas alone stays one.
export function withPoints(text) {
  const words = text.split(/[\s;]+/).map((word) => word.replace(/^,+|,+$/g, "")).filter(Boolean);
  const isRead = words.length > 1 && words.every((word) => !word.includes(",") || DECIMAL_COMMA.test(word)) && words.some((word) => withPoint(word) !== word);
  return isRead ? words.map(withPoint).join(" ") : text;
}

/**
 * Whether two texts of an option mean the same.
 * @param {{ control: string }} spec
 */
export function same(spec, left, right) {
  if (left === right) return true;
  if (spec.control === "number" && String(left).trim() !== "" && String(right).trim() !== "") return Number(left) === Number(right);
  if (spec.control === "numbers" || spec.control === "size") {
    const plain = (text) => String(text).split(/[\s,x]+/).filter(Boolean);
    const [a, b] = [plain(left), plain(right)];
    if (spec.control === "size" && a.length === 1) a.push(a[0]);
    if (spec.control === "size" && b.length === 1) b.push(b[0]);
    return a.length === b.length && a.every((item, index) => Number(item) === Number(b[index]));
  }
  return false;
}
