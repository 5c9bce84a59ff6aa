// How the values of a plot are laid out: limits of an axis, marks on it, smoothed lines.

// Limits of an axis for values, with room at both ends: without the wildest of them, which must not flatten all others. Of a logarithmic
// axis they are above 0.
export function limits(values, log) {
  const sorted = values.filter((value) => !log || value > 0).sort((a, b) => a - b);
  if (!sorted.length) return [0.1, 1];
  const low = sorted[Math.floor(0.002 * (sorted.length - 1))];
  const high = sorted[Math.ceil(0.995 * (sorted.length - 1))];
  if (log) {
    const [bottom, top] = [Math.max(low, 1e-8), Math.max(high, 1.01 * Math.max(low, 1e-8))];
    const pad = 0.05 * Math.log(top / bottom);
    return [bottom * Math.exp(-pad), top * Math.exp(pad)];
  }
  const pad = 0.06 * (high - low) || 0.1 * Math.abs(high) || 0.1;
  return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
}

// Round numbers between two limits, about `count` of them.
export function round(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 2.5, 5, 10].map((digit) => digit * power).find((value) => value >= rough) || power;
  const found = [];
  for (let value = Math.ceil(low / stride) * stride; value <= high + 1e-9 * stride; value += stride) found.push(Number(value.toPrecision(10)));
  return found;
}

// Marks of an axis: round numbers, and powers of ten with what stands between them where a logarithmic one spans several.
export function marks(low, high, count, log) {
  if (!log || high / low <= 8) return round(low, high, count);
  const digits = high / low > 200 ? [1] : [1, 2, 5];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const digit of digits) found.push(Number(`${digit}e${power}`));
  }
  return found.filter((value) => value >= low && value <= high);
}

// A running mean over about the last 15 % of the values, and at most about 50. What is missing stays so.
export function smoothed(values) {
  let mean = null;
  let count = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    count += 1;
    mean = mean === null ? value : mean + Math.max(0.02, 1 / (0.15 * count + 1)) * (value - mean);
    return mean;
  });
}

// The place of the step that is nearest to one, in rows of which each begins with its step.
export function nearest(rows, step) {
  let low = 0;
  let high = rows.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - rows[low - 1][0] < rows[low][0] - step ? low - 1 : low;
}
