/** Result of one model for a part of the stack: a plane with outlines, the number of objects, and the confidence. */

import { element, formatMessage } from "../core/elements.js";
import { formatCount, formatDuration } from "../core/format.js";
import { describeUsedDiameter } from "../core/terminology.js";
import { estimateQuantiles, extractPlane, paintGray, paintLabels } from "../volumes/slices.js";

/** @typedef {import("./trial.js").Outcome} Outcome */
/** @typedef {import("./trial.js").Part} Part */

/** Planes are drawn at a whole multiple of their size, at least this wide, so that the outlines are thin. */
const MIN_WIDTH_PIXELS = 480;
const CONTRAST_FRACTIONS = [0.01, 0.998];

/** Picture and text of one trial. */
export class TrialView {
  /** @param {string} modelName */
  constructor(modelName) {
    this.modelName = modelName;
    /** Result of the trial, null if there is none. @type {Outcome | null} */
    this.outcome = null;
    /** @type {Part | null} */
    this.part = null;
    /** @type {[number, number]} */
    this.contrast = [0, 1];
    this.startedAt = 0;
    this.canvas = element("canvas", { role: "img", hidden: true });
    this.placeholder = element("p", { class: "muted small" });
    this.text = element("div", { class: "gallery-trial" });
    this.figure = element(
      "figure",
      { class: "gallery-picture", hidden: true },
      element("div", { class: "gallery-image" }, this.canvas, this.placeholder),
      element("figcaption", { class: "muted small" }, "Your stack"),
    );
  }

  wait() {
    this.outcome = null;
    this.figure.hidden = false;
    this.text.replaceChildren();
    this.#showPlaceholder("Waiting");
  }

  start() {
    this.startedAt = performance.now();
    this.#showPlaceholder("Segmenting");
  }

  /** Show that the trial was canceled, unless it has ended. */
  cancel() {
    if (this.outcome === null && this.text.childElementCount === 0) this.#showPlaceholder("Canceled");
  }

  /** Show why the model cannot segment the part. @param {string} reason */
  fail(reason) {
    this.#showPlaceholder("No result");
    this.text.replaceChildren(element("p", { class: "warning-text" }, formatMessage(reason)));
  }

  /** @param {Part} part @param {Outcome} outcome */
  show(part, outcome) {
    this.part = part;
    this.outcome = outcome;
    const [low, high] = estimateQuantiles(part.pixels, CONTRAST_FRACTIONS);
    this.contrast = [low, high];
    this.placeholder.hidden = true;
    this.canvas.hidden = false;
    const { objects, confidence, diameter, warning } = outcome;
    const seconds = (performance.now() - this.startedAt) / 1000;
    const countText = objects === null ? "Classes, not objects" : formatCount(objects, "object");
    const confidenceText = confidence === null ? "no confidence" : `confidence ${Math.round(100 * confidence)}%`;
    this.canvas.ariaLabel = `Result of ${this.modelName} for the part of your stack: ${countText}`;
    this.text.replaceChildren(
      element("p", { class: "big" }, `${countText}, ${confidenceText}`),
      element(
        "p",
        { class: "muted small" },
        [describeUsedDiameter(diameter), formatDuration(seconds)].filter(Boolean).join(" · "),
      ),
    );
    if (warning) this.text.append(element("p", { class: "small gallery-warning" }, formatMessage(warning)));
  }

  /** Draw a plane of the part with the outlines of its objects. @param {number} z */
  drawPlane(z) {
    const { part, outcome, canvas, contrast } = this;
    if (part === null || outcome === null) return;
    const volume = {
      shape: part.box.shape,
      step: /** @type {[number, number, number]} */ ([1, 1, 1]),
      fullShape: part.box.shape,
    };
    const plane = extractPlane({ ...volume, data: part.pixels }, 0, z);
    const labels = extractPlane({ ...volume, data: outcome.labels }, 0, z);
    const scale = Math.max(1, Math.ceil(MIN_WIDTH_PIXELS / plane.width));
    canvas.width = plane.width * scale;
    canvas.height = plane.height * scale;
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.imageSmoothingEnabled = false;
    drawImage(context, paintGray(plane, contrast[0], Math.max(contrast[1], contrast[0] + 1e-9)));
    const outlines = context.createImageData(canvas.width, canvas.height);
    const style = { fillObjects: false, selectedId: 0, hiddenFlags: null, colorIndices: null, thickness: 2 };
    paintLabels(labels, outlines, { left: 0, top: 0, scaleX: scale, scaleY: scale }, style);
    drawImage(context, outlines);
  }

  /** @param {string} text */
  #showPlaceholder(text) {
    this.canvas.hidden = true;
    this.placeholder.hidden = false;
    this.placeholder.textContent = text;
  }
}

/** Draw an image over the whole canvas. @param {CanvasRenderingContext2D} context @param {ImageData} image */
function drawImage(context, image) {
  const source = element("canvas", { width: image.width, height: image.height });
  source.getContext("2d")?.putImageData(image, 0, 0);
  context.drawImage(source, 0, 0, context.canvas.width, context.canvas.height);
}
