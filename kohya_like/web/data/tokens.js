// About how many tokens a text encoder makes of a caption; its own vocabulary is not here.

// Words of up to six letters are mostly one token, longer ones about one for each five letters; numbers and marks stand alone.
export function aboutTokens(text) {
  const pieces = text.toLowerCase().match(/\p{Script=Han}|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+/gu) || [];
  return pieces.reduce((sum, piece) => sum + (piece.length <= 6 ? 1 : Math.ceil(piece.length / 5)), 0);
}
