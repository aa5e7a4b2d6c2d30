/** Curves of a training run, drawn on a canvas. */

import { element } from "../core/elements.js";
import { formatCount, formatNumber } from "../core/format.js";

/** Line chart of values by training step. It also shows the range and the last values as text. */
export class LineChart {
  /** @param {string} title @param {string[]} names of the lines */
  constructor(title, names) {
    this.title = title;
    this.names = names;
    this.legendEntries = names.map((name, line) =>
      element("span", { class: "muted", "data-line": String(line) }, name),
    );
    /** @type {[number, number][][]} */
    this.lines = [];
    this.canvas = element("canvas", { role: "img" });
    this.canvas.addEventListener("theme", () => this.show(this.lines));
    this.axisLabels = element("div", { class: "axis muted" });
    this.root = element(
      "figure",
      { class: "curve", hidden: true },
      element("figcaption", {}, element("span", {}, title), ...this.legendEntries),
      this.canvas,
      this.axisLabels,
    );
  }

  /** @param {[number, number][][]} lines points (step, value) of each line */
  show(lines) {
    this.lines = lines;
    const points = lines.flat();
    this.root.hidden = points.length === 0;
    if (points.length === 0) return;
    const values = points.map(([, value]) => value);
    const range = {
      min: Math.min(...values),
      max: Math.max(...values),
      lastStep: Math.max(...points.map(([step]) => step)),
    };
    const descriptions = lines.map((line, index) => {
      const lastPoint = line.at(-1);
      return lastPoint ? `${this.names[index]} ${formatNumber(lastPoint[1])}` : this.names[index];
    });
    for (const [index, text] of descriptions.entries()) this.legendEntries[index].textContent = text;
    this.canvas.setAttribute(
      "aria-label",
      `${this.title} after ${formatCount(range.lastStep, "step")}: ${descriptions.join(", ")}`,
    );
    this.axisLabels.replaceChildren(
      element("span", {}, `${formatNumber(range.min)} – ${formatNumber(range.max)}`),
      element("span", {}, formatCount(range.lastStep, "step")),
    );
    this.#draw(lines, range);
  }

  /** @param {[number, number][][]} lines @param {{min: number, max: number, lastStep: number}} range */
  #draw(lines, { min, max, lastStep }) {
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const context = canvas.getContext("2d");
    if (context === null) return;
    context.scale(ratio, ratio);
    const [width, height] = [canvas.clientWidth - 12, canvas.clientHeight - 12];
    for (const [index, line] of lines.entries()) {
      context.strokeStyle = context.fillStyle = getComputedStyle(this.legendEntries[index], "::before").backgroundColor;
      context.lineWidth = index === 0 ? 1.5 : 2;
      context.beginPath();
      for (const [step, value] of line) {
        const x = 6 + (width * step) / Math.max(1, lastStep);
        const y = 6 + height * (1 - (value - min) / Math.max(max - min, 1e-12));
        context.lineTo(x, y);
        if (index > 0) context.fillRect(x - 2.5, y - 2.5, 5, 5);
      }
      context.stroke();
    }
  }
}
