// Rows and columns of a grid of images.

// The next cell of a grid of rows x columns in a direction that has an image, from `at` on; `at` where there is none.
export function neighbour(there, at, [down, right]) {
  for (let row = at.row + down, column = at.column + right; there[row] && column in there[row]; row += down, column += right) {
    if (there[row][column]) return { row, column };
  }
  return at;
}

// Rows of one prompt belong together: [{prompt, rows: [number]}].
export function byPrompt(rows) {
  const groups = [];
  rows.forEach(({ prompt }, number) => {
    const last = groups.at(-1);
    if (last && last.prompt === prompt) last.rows.push(number);
    else groups.push({ prompt, rows: [number] });
  });
  return groups;
}
