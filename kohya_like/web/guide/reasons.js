// Why settings are as they are, as far as the guide chose them: option -> {value, why}, kept as long as the page is open.

export const reasons = new Map();

export function chose(rows) {
  reasons.clear();
  for (const { option, value, why } of rows) reasons.set(option, { value, why });
}
