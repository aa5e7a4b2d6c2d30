/** Previews of the channels or scenes of a stack, as buttons that select one of them. */

import { element, formatMessage } from "../core/elements.js";
import { estimateQuantiles, extractPlane, paintGray } from "../volumes/slices.js";

/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../viewer/scene.js").Color} Color */

/**
 * @typedef {object} Preview
 * @property {import("../core/elements.js").Child[]} caption
 * @property {Color} color
 * @property {() => Promise<Volume>} fetchPlane fetches a small plane from the middle of the stack
 */

/**
 * Create a button for each preview. The planes are fetched one after another, because the service reads a volume for each.
 * @param {string} label of the group of buttons @param {Preview[]} previews
 * @param {(index: number) => void} onselect called with the index of the selected preview
 */
export function createPreviews(label, previews, onselect) {
  const buttons = previews.map(({ caption }, index) => {
    const canvas = element("canvas", { width: 72, height: 54, "aria-hidden": "true" });
    const text = element("span", {}, ...caption);
    // Long names are cut off after two lines.
    const properties = {
      type: "button",
      class: "preview",
      title: text.textContent ?? "",
      onclick: () => onselect(index),
    };
    return element("button", properties, canvas, text);
  });
  drawPreviews(buttons, previews);
  return element("div", { class: "previews", role: "group", "aria-label": label }, ...buttons);
}

/** Draw the previews in their buttons. A preview that cannot be read has no picture, and its title states why. @param {HTMLButtonElement[]} buttons @param {Preview[]} previews */
async function drawPreviews(buttons, previews) {
  for (const [index, { fetchPlane, color }] of previews.entries()) {
    const canvas = buttons[index].querySelector("canvas");
    try {
      const volume = await fetchPlane();
      if (canvas) drawPreview(canvas, volume, color);
    } catch (error) {
      canvas?.remove();
      buttons[index].title = formatMessage(error).textContent ?? "";
    }
  }
}

/** @param {HTMLCanvasElement} canvas @param {Volume} volume of one plane @param {Color} color */
function drawPreview(canvas, volume, color) {
  const [low, high] = estimateQuantiles(volume.data, [0.01, 0.995]);
  const plane = extractPlane(volume, 0, 0);
  const image = element("canvas", { width: plane.width, height: plane.height });
  image.getContext("2d")?.putImageData(paintGray(plane, low, Math.max(high, low + 1e-9), color), 0, 0);
  const scale = Math.max(canvas.width / plane.width, canvas.height / plane.height);
  const [width, height] = [plane.width * scale, plane.height * scale];
  canvas.getContext("2d")?.drawImage(image, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
}
