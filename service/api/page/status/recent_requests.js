/** Card with the most recent requests and the time that each stage took. */

import { element } from "../core/elements.js";
import { formatNumber } from "../core/format.js";
import { createTable } from "./card.js";

/** @typedef {import("openapi").SegmentationReport} Segmentation */

/** Groups of stages that share a color: title and stages. @type {[string, string[]][]} */
const STAGE_GROUPS = [
  ["Receive, read", ["receive", "read"]],
  ["Wait", ["queue"]],
  ["Prepare", ["prepare", "size", "skip"]],
  ["Windows", ["windows"]],
  ["Decode", ["decode"]],
  ["Measure, write", ["measure", "write", "save"]],
];

/** Create the legend of the stage colors. */
export function createLegend() {
  const entries = STAGE_GROUPS.map(([name], groupIndex) =>
    element("li", {}, element("span", { class: "key", "data-group": groupIndex }), name),
  );
  return element("ul", { class: "legend muted" }, ...entries);
}

/** @param {Segmentation[]} requests newest first */
export function createRecentRequests(requests) {
  if (requests.length === 0) return [element("p", { class: "muted" }, "No requests since the service started.")];
  return [
    createTable(
      "Recent requests, newest first",
      ["Ended", "Model", "Voxels", "Objects", "Seconds", "Time by stage"],
      requests.map(({ ended, model, voxels, objects, seconds }) => [
        new Date(ended).toLocaleTimeString("en-GB"),
        model,
        formatNumber(voxels),
        objects === null ? "–" : formatNumber(objects),
        formatNumber(
          Object.values(seconds).reduce((sum, value) => sum + value, 0),
          3,
        ),
        createStageBar(seconds),
      ]),
      "recent-requests",
    ),
  ];
}

/** Create a bar that shows the share of each stage. @param {Record<string, number>} seconds by stage */
function createStageBar(seconds) {
  const stages = Object.entries(seconds);
  const descriptions = stages.map(([stage, value]) => `${stage} ${formatNumber(value, 2)} s`);
  const segments = stages.map(([stage, value], index) => {
    const groupIndex = STAGE_GROUPS.findIndex(([, names]) => names.includes(stage));
    const segment = element("span", { class: "key", "data-group": groupIndex, title: descriptions[index] });
    segment.style.flexGrow = String(value);
    return segment;
  });
  return element("div", { class: "stage-bar", role: "img", "aria-label": descriptions.join(", ") }, ...segments);
}
