/** Legend of the classes of a result, with the volume of each class. */

import { element, redraw } from "../core/elements.js";
import { formatNumber } from "../core/format.js";
import { getCssColor } from "../volumes/label_colors.js";

/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../viewer/scene.js").SceneState} SceneState */

/** Largest label of a class. */
const MAX_CLASS = 255;

/** @param {Volume} labels @returns {Map<number, number>} number of voxels of each class, in the order of the classes, without the background */
function countVoxels({ data }) {
  const counts = new Uint32Array(MAX_CLASS + 1);
  for (let index = 0; index < data.length; index += 1) counts[data[index]] += 1;
  return new Map([...counts.entries()].slice(1).filter(([, count]) => count > 0));
}

/** Table with the color, the name and the volume of each class. */
export class ClassLegend {
  /** @param {string[]} names of the classes, by label; empty if unknown */
  constructor(names) {
    this.names = names;
    this.root = element("div", { class: "class-legend" });
  }

  /** Show the classes of the displayed labels. @param {SceneState} state */
  show({ labels, voxelSize, isCalibrated }) {
    if (labels === null) return;
    const counts = countVoxels(labels);
    const voxelVolume = voxelSize[0] * voxelSize[1] * voxelSize[2];
    const voxelsPerSample = labels.step[0] * labels.step[1] * labels.step[2];
    const describeVolume = (/** @type {number} */ count) =>
      isCalibrated ? `${formatNumber(count * voxelVolume)} µm³` : `${formatNumber(count * voxelsPerSample)} voxels`;
    redraw(this.root, () => [
      element(
        "table",
        {},
        element("caption", { class: "visually-hidden" }, "Classes"),
        element(
          "thead",
          {},
          element(
            "tr",
            {},
            ...["Class", "Volume", "Share of the stack"].map((title) => element("th", { scope: "col" }, title)),
          ),
        ),
        element(
          "tbody",
          {},
          ...[...counts].map(([label, count]) =>
            element(
              "tr",
              {},
              element("td", {}, createDot(label), this.names[label] ?? `Class ${label}`),
              element("td", {}, describeVolume(count)),
              element("td", {}, `${formatNumber((100 * count) / labels.data.length, 2)}%`),
            ),
          ),
        ),
      ),
      counts.size === 0 && element("p", { class: "muted" }, "All voxels are background."),
    ]);
  }
}

/** @param {number} label */
function createDot(label) {
  const dot = element("span", { class: "dot" });
  dot.style.background = getCssColor(label);
  return dot;
}
