// Which of many things words mean.

const MOST = 40;

/**
 * Which entries have all words, those that begin with the first before others.
 * @template {{words: string, also?: string}} T
 * @param {T[]} entries
 * @param {string} text
 * @returns {T[]}
 */
export function found(entries, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const rank = ({ words: own, also = "" }) => {
    const said = own.toLowerCase();
    if (!words.every((word) => `${said} ${also.toLowerCase()}`.includes(word))) return -1;
    if (!words.length || said.startsWith(words[0])) return 2;
    return words.every((word) => said.includes(word)) ? 1 : 0;
  };
  return entries.map((entry) => ({ entry, place: rank(entry) })).filter(({ place }) => place >= 0)
    .sort((one, other) => other.place - one.place).map(({ entry }) => entry).slice(0, MOST);
}
