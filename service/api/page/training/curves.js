/** Curves of a training on a canvas. */

import { element } from "../core/elements.js";
import { counted, number } from "../core/format.js";

/** Lines over the steps on one canvas, with their range and last values in words. */
export class Curves {
  /** @param {string} title @param {string[]} names of the lines */
  constructor(title, names) {
    this.title = title;
    this.names = names;
    this.last = names.map((name, line) => element("span", { class: "muted", "data-line": String(line) }, name));
    /** @type {[number, number][][]} */
    this.lines = [];
    this.canvas = element("canvas", { role: "img" });
    this.canvas.addEventListener("theme", () => this.show(this.lines));
    this.foot = element("div", { class: "axis muted" });
    this.root = element(
      "figure",
      { class: "curve", hidden: true },
      element("figcaption", {}, element("span", {}, title), ...this.last),
      this.canvas,
      this.foot,
    );
  }

  /** @param {[number, number][][]} lines step and value */
  show(lines) {
    this.lines = lines;
    const points = lines.flat();
    this.root.hidden = points.length === 0;
    if (points.length === 0) return;
    const values = points.map(([, value]) => value);
    const range = {
      least: Math.min(...values),
      most: Math.max(...values),
      steps: Math.max(...points.map(([step]) => step)),
    };
    const told = lines.map((line, place) => {
      const last = line.at(-1);
      return last ? `${this.names[place]} ${number(last[1])}` : this.names[place];
    });
    for (const [place, text] of told.entries()) this.last[place].textContent = text;
    this.canvas.setAttribute("aria-label", `${this.title} after ${counted(range.steps, "step")}: ${told.join(", ")}`);
    this.foot.replaceChildren(
      element("span", {}, `${number(range.least)} – ${number(range.most)}`),
      element("span", {}, counted(range.steps, "step")),
    );
    this.#draw(lines, range);
  }

  /** @param {[number, number][][]} lines @param {{least: number, most: number, steps: number}} range */
  #draw(lines, { least, most, steps }) {
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const context = canvas.getContext("2d");
    if (context === null) return;
    context.scale(ratio, ratio);
    const [width, height] = [canvas.clientWidth - 12, canvas.clientHeight - 12];
    for (const [place, line] of lines.entries()) {
      context.strokeStyle = context.fillStyle = getComputedStyle(this.last[place], "::before").backgroundColor;
      context.lineWidth = place === 0 ? 1.5 : 2;
      context.beginPath();
      for (const [step, value] of line) {
        const x = 6 + (width * step) / Math.max(1, steps);
        const y = 6 + height * (1 - (value - least) / Math.max(most - least, 1e-12));
        context.lineTo(x, y);
        if (place > 0) context.fillRect(x - 2.5, y - 2.5, 5, 5);
      }
      context.stroke();
    }
  }
}
