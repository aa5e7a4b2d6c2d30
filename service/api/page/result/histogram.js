/** A histogram of a column, in which a range is chosen by dragging. */

import { element } from "../core/elements.js";
import { number } from "../core/format.js";

const BINS = 32;

export class Histogram extends EventTarget {
  /** @param {string} title @param {Float64Array} values */
  constructor(title, values) {
    super();
    this.values = values;
    let [least, most] = [Infinity, -Infinity];
    for (const value of values) {
      least = Math.min(least, value);
      most = Math.max(most, value);
    }
    this.least = Number.isFinite(least) ? least : 0;
    this.most = Number.isFinite(most) && most > least ? most : this.least + 1;
    /** @type {[number, number] | null} */
    this.chosen = null;
    this.canvas = element("canvas", {
      role: "img",
      "aria-label": `Histogram of ${title}, from ${number(this.least)} to ${number(this.most)}`,
    });
    this.words = element("output", { class: "muted small" });
    this.root = element(
      "figure",
      { class: "histogram" },
      element("figcaption", {}, element("span", {}, title), this.words),
      this.canvas,
      element(
        "div",
        { class: "axis muted small" },
        element("span", {}, number(this.least)),
        element("span", {}, number(this.most)),
      ),
    );
    this.#listen();
    this.canvas.addEventListener("theme", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  #listen() {
    let start = 0;
    const valueAt = (/** @type {PointerEvent} */ event) => {
      const bounds = this.canvas.getBoundingClientRect();
      const share = Math.max(0, Math.min(1, (event.clientX - bounds.left) / bounds.width));
      return this.least + share * (this.most - this.least);
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      start = valueAt(event);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.canvas.hasPointerCapture(event.pointerId)) return;
      const value = valueAt(event);
      this.choose(
        Math.abs(value - start) < (this.most - this.least) / 100
          ? null
          : [Math.min(start, value), Math.max(start, value)],
      );
    });
    this.canvas.addEventListener("click", () => {
      if (this.chosen && Math.abs(this.chosen[1] - this.chosen[0]) === 0) this.choose(null);
    });
    this.canvas.addEventListener("dblclick", () => this.choose(null));
  }

  /** @param {[number, number] | null} range */
  choose(range) {
    this.chosen = range;
    this.words.value = range ? `${number(range[0])} to ${number(range[1])}` : "";
    this.draw();
    this.dispatchEvent(new Event("change"));
  }

  draw() {
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, canvas.clientWidth * ratio);
    canvas.height = Math.max(1, canvas.clientHeight * ratio);
    const context = canvas.getContext("2d");
    if (context === null) return;
    const counts = new Uint32Array(BINS);
    const scale = BINS / (this.most - this.least);
    for (const value of this.values) counts[Math.min(BINS - 1, Math.floor((value - this.least) * scale))] += 1;
    const most = Math.max(1, ...counts);
    const style = getComputedStyle(canvas);
    const width = canvas.width / BINS;
    counts.forEach((count, bin) => {
      const middle = this.least + (bin + 0.5) / scale;
      const inside = this.chosen === null || (middle >= this.chosen[0] && middle <= this.chosen[1]);
      context.fillStyle = inside ? style.color : style.borderBottomColor;
      const height = (count / most) * (canvas.height - 2);
      context.fillRect(
        bin * width + 0.5,
        canvas.height - height,
        Math.max(width - 1.5, 1),
        count ? Math.max(height, 1.5) : 0,
      );
    });
  }
}
