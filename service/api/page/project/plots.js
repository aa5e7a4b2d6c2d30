/** Plots of a project as SVG: objects per stack, and distributions of their volumes and intensities, by group and stack. */

import { formatNumber } from "../core/format.js";

/** @typedef {import("./statistics.js").Summary} Summary */
/** @typedef {{bar: number | null, box: Summary | null, dots: number[], median: number | null}} Cell values of one row of a panel; median: the number at its right */
/** @typedef {{label: string, group: number, isGroup: boolean, cells: Cell[]}} Row group: index of the group, for its color */
/** @typedef {{title: string, startsAtZero: boolean, minStep: number}} Panel minStep: smallest distance of the ticks */

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";
export const COLOR_COUNT = 8;
const LABEL_WIDTH = 168;
const NUMBER_WIDTH = 62;
const PANEL_GAP = 22;
const HEADER_HEIGHT = 26;
const AXIS_HEIGHT = 24;
const ROW_HEIGHT = 19;
const GROUP_HEIGHT = 30;
const CHARACTER_WIDTH = 7.2;
/** Panels are below each other if each would be narrower than this. */
const MIN_PANEL_WIDTH = 190;
const MIN_TICK_DISTANCE = 45;

/** @param {string} tag @param {Record<string, string | number>} attributes @param {...(Node | string)} children */
function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/**
 * Draw all panels, side by side if there is enough space.
 * @param {Panel[]} panels @param {Row[]} rows with a cell for each panel @param {number} width in pixels
 * @returns {Element[]} one or several SVG elements
 */
export function drawPlots(panels, rows, width) {
  const panelWidth = (width - LABEL_WIDTH) / panels.length;
  const indices = panels.map((_, index) => index);
  const figures = panelWidth >= MIN_PANEL_WIDTH ? [indices] : indices.map((index) => [index]);
  return figures.map((figure) => drawFigure(panels, rows, figure, width));
}

/** @param {Panel[]} panels @param {Row[]} rows @param {number[]} indices of the panels to draw @param {number} width */
function drawFigure(panels, rows, indices, width) {
  const tops = [HEADER_HEIGHT];
  for (const { isGroup } of rows) tops.push((tops.at(-1) ?? 0) + (isGroup ? GROUP_HEIGHT : ROW_HEIGHT));
  const bottom = tops[rows.length];
  const root = svg("svg", {
    class: "plot",
    width,
    height: bottom + AXIS_HEIGHT,
    viewBox: `0 0 ${width} ${bottom + AXIS_HEIGHT}`,
    role: "img",
    "aria-label": describeFigure(panels, rows, indices),
  });
  root.append(...rows.map((row, index) => drawLabel(row, (tops[index] + tops[index + 1]) / 2)));
  const panelWidth = (width - LABEL_WIDTH) / indices.length;
  for (const [position, index] of indices.entries()) {
    const left = LABEL_WIDTH + position * panelWidth;
    const scale = createScale(panels[index], rows, index, left, left + panelWidth - NUMBER_WIDTH - PANEL_GAP);
    // A panel of a narrow page has less width than its title.
    const titleLeft = indices.length === 1 ? 0 : left;
    root.append(svg("text", { x: titleLeft, y: 14, class: "plot-title" }, panels[index].title));
    root.append(...drawAxis(scale, HEADER_HEIGHT - 4, bottom));
    for (const [rowIndex, row] of rows.entries()) {
      root.append(drawCell(row, index, scale, tops[rowIndex], tops[rowIndex + 1]));
    }
  }
  return root;
}

/** @param {Panel[]} panels @param {Row[]} rows @param {number[]} indices */
function describeFigure(panels, rows, indices) {
  return indices
    .map((index) => {
      const medians = rows
        .filter(({ isGroup }) => isGroup)
        .map(({ label, cells }) => `${label}: median ${formatNumber(cells[index].median ?? Number.NaN)}`);
      return `${panels[index].title}: ${medians.join(", ")}`;
    })
    .join(". ");
}

/** @param {Row} row @param {number} center */
function drawLabel({ label, group, isGroup }, center) {
  const indent = isGroup ? 16 : 28;
  const maxLength = Math.floor((LABEL_WIDTH - indent - 8) / CHARACTER_WIDTH);
  const text = label.length > maxLength ? `${label.slice(0, maxLength - 1)}…` : label;
  const node = svg(
    "g",
    { class: `group-${group % COLOR_COUNT}` },
    svg("text", { x: indent, y: center + 4, class: isGroup ? "plot-group" : "plot-label" }, text),
    svg("title", {}, label),
  );
  if (isGroup) node.append(svg("circle", { cx: 6, cy: center, r: 5, class: "plot-dot" }));
  return node;
}

/** @typedef {{toX: (value: number) => number, ticks: number[], right: number}} Scale */

/** @param {Panel} panel @param {Row[]} rows @param {number} index of the panel @param {number} left @param {number} right @returns {Scale} */
function createScale({ startsAtZero, minStep }, rows, index, left, right) {
  const values = rows.flatMap(({ cells }) => {
    const { bar, box, dots } = cells[index];
    return [...(bar === null ? [] : [bar]), ...(box?.whiskers ?? []), ...dots];
  });
  const max = Math.max(...values, Number.NEGATIVE_INFINITY);
  const high = Number.isFinite(max) ? max : 1;
  const low = startsAtZero ? Math.min(0, ...values) : Math.min(...values, high);
  const maxCount = Math.max(2, Math.floor((right - left) / MIN_TICK_DISTANCE));
  const step = Math.max(chooseStep(high - low || 1, maxCount), minStep);
  const [first, last] = [Math.floor(low / step), Math.max(Math.ceil(high / step), Math.floor(low / step) + 1)];
  const ticks = Array.from({ length: last - first + 1 }, (_, tick) => (first + tick) * step);
  const unit = (right - left) / ((last - first) * step);
  return { toX: (value) => left + (value - first * step) * unit, ticks, right };
}

/** Return a distance of ticks that is 1, 2 or 5 times a power of ten. @param {number} range @param {number} maxCount maximum number of intervals */
function chooseStep(range, maxCount) {
  const power = 10 ** Math.floor(Math.log10(range / maxCount));
  const factor = [1, 2, 5].find((candidate) => candidate * power * maxCount >= range) ?? 10;
  return factor * power;
}

/** @param {Scale} scale @param {number} top @param {number} bottom */
function drawAxis({ toX, ticks }, top, bottom) {
  return ticks.flatMap((tick) => [
    svg("line", { x1: toX(tick), x2: toX(tick), y1: top, y2: bottom, class: "plot-grid" }),
    svg("text", { x: toX(tick), y: bottom + 15, class: "plot-tick" }, formatNumber(tick)),
  ]);
}

/** @param {Row} row @param {number} index of the panel @param {Scale} scale @param {number} top @param {number} bottom */
function drawCell({ label, group, isGroup, cells }, index, { toX, right }, top, bottom) {
  const { bar, box, dots, median } = cells[index];
  const center = (top + bottom) / 2;
  const half = isGroup ? 9 : 6;
  const node = svg("g", { class: `group-${group % COLOR_COUNT}` }, svg("title", {}, describeCell(label, cells[index])));
  if (bar !== null)
    node.append(
      svg("rect", { x: toX(0), y: center - half, width: toX(bar) - toX(0), height: 2 * half, class: "plot-box" }),
    );
  if (box) {
    const [low, high] = box.whiskers.map(toX);
    const [first, third] = box.quartiles.map(toX);
    node.append(
      svg("line", { x1: low, x2: high, y1: center, y2: center, class: "plot-whisker" }),
      svg("rect", { x: first, y: center - half, width: third - first, height: 2 * half, class: "plot-box" }),
    );
  }
  if (median !== null && bar === null)
    node.append(
      svg("line", {
        x1: toX(median),
        x2: toX(median),
        y1: center - half - 1,
        y2: center + half + 1,
        class: "plot-median",
      }),
    );
  node.append(...dots.map((value) => svg("circle", { cx: toX(value), cy: center, r: 3, class: "plot-dot" })));
  if (median !== null)
    node.append(svg("text", { x: right + 10, y: center + 4, class: "plot-number" }, formatNumber(median)));
  return node;
}

/** @param {string} label @param {Cell} cell */
function describeCell(label, { bar, box, median }) {
  if (bar !== null) return `${label}: ${formatNumber(bar)}`;
  const text = median === null ? "no values" : `median ${formatNumber(median)}`;
  if (box === null) return `${label}: ${text}`;
  return `${label}: ${text}, quartiles ${box.quartiles.map((value) => formatNumber(value)).join(" and ")}, ${formatNumber(box.count)} objects`;
}
