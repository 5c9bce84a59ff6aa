// An image from the computer in front of somebody, kept by the studio to draw with.

import { t, translated } from "./language.js";
import { ask } from "./studio.js";

const OF_FILE = "images: the file ";

/**
 * @param {File} file
 * @param {number} maxBytes that an image may have
 * @returns {Promise<any>} what the studio has made of it; an Error says why it took none
 */
export async function uploadImage(file, maxBytes) {
  if (file.size > maxBytes) throw new Error(t`${file.name} is larger than ${maxBytes >> 20} MiB, which is the most.`);
  const { image, problems } = await ask("/kl/predict/upload", { method: "POST", body: file });
  const told = ({ message }) => (message.startsWith(OF_FILE) ? `${file.name || t`The image`} ${translated(message.slice(OF_FILE.length))}` : translated(message));
  if (problems) throw new Error(problems.map(told).join(" "));
  return image;
}
