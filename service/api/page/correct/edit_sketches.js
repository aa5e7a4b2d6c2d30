/** Overlay that shows the state of the tools on the slices: seeds of a split, lines, outlines, and the brush. */

import { element } from "../core/elements.js";
import { getCssColor } from "../volumes/label_colors.js";
import { extractPlane, IN_PLANE_AXES, paintLabels } from "../volumes/slices.js";

/** @typedef {import("./edit_tools.js").EditTools} EditTools */
/** @typedef {import("../viewer/slice_view.js").SliceView} SliceView */

const SKETCH_COLOR = "#ffd166";
const SEED_RADIUS_PIXELS = 4;
const REGION_COLOR = "#4dd6b8";
const OUTSIDE_COLOR = "#0008";

/** Canvases, one for each view, that show the unfinished correction. */
export class EditSketches {
  /** @param {EditTools} tools @param {AbortSignal} signal removes the canvases */
  constructor(tools, signal) {
    this.tools = tools;
    this.canvases = tools.viewer.views.map((view) => {
      const canvas = element("canvas", { class: "sketch", "aria-hidden": "true" });
      view.stage.append(canvas);
      return canvas;
    });
    this.suggestionCanvases = tools.viewer.views.map((view, index) => {
      const canvas = element("canvas", { class: "sketch", "aria-hidden": "true" });
      view.stage.insertBefore(canvas, this.canvases[index]);
      return canvas;
    });
    tools.viewer.addEventListener("draw", () => this.#drawSuggestions(), { signal });
    tools.viewer.addEventListener("draw", () => this.draw(), { signal });
    signal.addEventListener("abort", () => {
      for (const canvas of [...this.canvases, ...this.suggestionCanvases]) canvas.remove();
    });
  }

  draw() {
    for (const [index, view] of this.tools.viewer.views.entries()) {
      const canvas = this.canvases[index];
      canvas.width = view.labelsCanvas.width;
      canvas.height = view.labelsCanvas.height;
      const context = canvas.getContext("2d");
      if (context === null) continue;
      const ratio = view.pixelRatio ?? 1;
      context.scale(ratio, ratio);
      context.strokeStyle = context.fillStyle = SKETCH_COLOR;
      context.lineWidth = 1.5;
      this.#drawRegion(view, context);
      this.#drawSeeds(view, context);
      this.#drawLines(view, context);
      this.#drawBrush(view, context);
    }
  }

  /** Show the outlines of the suggested objects that have not been accepted. */
  #drawSuggestions() {
    const { suggestions, viewer, editor } = this.tools;
    if (suggestions === null) return;
    const hiddenFlags = suggestions.createHiddenFlags(editor);
    for (const [index, view] of viewer.views.entries()) {
      const canvas = this.suggestionCanvases[index];
      canvas.width = view.labelsCanvas.width;
      canvas.height = view.labelsCanvas.height;
      const context = canvas.getContext("2d");
      if (context === null || !viewer.scene.state.showObjects) continue;
      const image = context.createImageData(canvas.width, canvas.height);
      const plane = extractPlane(suggestions.labels, view.axis, viewer.scene.state.position[view.axis]);
      const ratio = view.pixelRatio ?? 1;
      const { left, top, scaleX, scaleY } = view.getPlacement();
      paintLabels(
        plane,
        image,
        { left: left * ratio, top: top * ratio, scaleX: scaleX * ratio, scaleY: scaleY * ratio },
        { fillObjects: false, selectedId: 0, hiddenFlags, colorIndices: suggestions.colorIndices, thickness: 1 },
      );
      context.putImageData(image, 0, 0);
    }
  }

  /** Show the region in which every object is labeled. @param {SliceView} view @param {CanvasRenderingContext2D} context */
  #drawRegion(view, context) {
    const { kind, box, planes } = this.tools.region.state;
    context.save();
    context.strokeStyle = REGION_COLOR;
    if (box && (kind === "box" || kind === "planes")) this.#drawBox(view, context, box);
    if (kind === "planes") for (const plane of planes) this.#drawMarkedPlane(view, context, plane);
    context.restore();
  }

  /** Darken everything outside a box. @param {SliceView} view @param {CanvasRenderingContext2D} context @param {import("../volumes/annotated_region.js").Box} box */
  #drawBox(view, context, { low, high }) {
    const { left, top, scaleX, scaleY } = view.getPlacement();
    const [downAxis, rightAxis] = IN_PLANE_AXES[view.axis];
    const planeIndex = this.tools.viewer.scene.state.position[view.axis];
    const isInside = low[view.axis] <= planeIndex && planeIndex < high[view.axis];
    const [x, width] = [left + low[rightAxis] * scaleX, (high[rightAxis] - low[rightAxis]) * scaleX];
    const [y, height] = [top + low[downAxis] * scaleY, (high[downAxis] - low[downAxis]) * scaleY];
    context.fillStyle = OUTSIDE_COLOR;
    context.beginPath();
    context.rect(0, 0, view.width, view.height);
    if (isInside) context.rect(x, y, width, height);
    context.fill("evenodd");
    context.setLineDash(isInside ? [] : [5, 4]);
    context.strokeRect(x, y, width, height);
    context.setLineDash([]);
  }

  /** Show a marked plane as a frame in its own view, and as a line in the other views. @param {SliceView} view @param {CanvasRenderingContext2D} context @param {import("../volumes/annotated_region.js").MarkedPlane} plane */
  #drawMarkedPlane(view, context, { axis, at }) {
    const { viewer, editor } = this.tools;
    const isOwnView = axis === view.axis;
    if (isOwnView && at !== viewer.scene.state.position[axis]) return;
    const { left, top, scaleX, scaleY } = view.getPlacement();
    const [downAxis, rightAxis] = IN_PLANE_AXES[view.axis];
    const { shape } = editor.labels;
    const getRange = (/** @type {number} */ viewAxis) =>
      viewAxis === axis ? [at + 0.5, at + 0.5] : [0, shape[viewAxis]];
    const [[x, stopX], [y, stopY]] = [getRange(rightAxis), getRange(downAxis)];
    context.lineWidth = isOwnView ? 3 : 1.5;
    context.strokeRect(left + x * scaleX, top + y * scaleY, (stopX - x) * scaleX, (stopY - y) * scaleY);
  }

  /** @param {SliceView} view @param {CanvasRenderingContext2D} context */
  #drawSeeds(view, context) {
    const { sketch, seed, tool, viewer } = this.tools;
    const seeds = [
      ...(seed ? [seed.position] : []),
      ...(sketch?.kind === "split" && tool === "split" ? sketch.seeds : []),
    ];
    const placement = view.getPlacement();
    const [downAxis, rightAxis] = IN_PLANE_AXES[view.axis];
    for (const position of seeds) {
      const isInPlane = Math.abs(position[view.axis] - viewer.scene.state.position[view.axis]) < 1;
      const x = placement.left + (position[rightAxis] + 0.5) * placement.scaleX;
      const y = placement.top + (position[downAxis] + 0.5) * placement.scaleY;
      context.globalAlpha = isInPlane ? 1 : 0.35;
      context.beginPath();
      context.arc(x, y, SEED_RADIUS_PIXELS, 0, 2 * Math.PI);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  /** @param {SliceView} view @param {CanvasRenderingContext2D} context */
  #drawLines(view, context) {
    const { line, sketch, tool, viewer } = this.tools;
    const planeIndex = viewer.scene.state.position[view.axis];
    const outlines = sketch?.kind === "add" && tool === "add" && sketch.axis === view.axis ? sketch.outlines : [];
    const closedLines = outlines
      .filter(({ at }) => at === planeIndex)
      .map(({ points }) => ({ points, isClosed: true }));
    const openLines = line?.view === view ? [{ points: line.points, isClosed: false }] : [];
    const { left, top, scaleX, scaleY } = view.getPlacement();
    for (const { points, isClosed } of [...closedLines, ...openLines]) {
      context.beginPath();
      for (const [v, u] of points) context.lineTo(left + u * scaleX, top + v * scaleY);
      if (isClosed) context.closePath();
      context.stroke();
    }
  }

  /** @param {SliceView} view @param {CanvasRenderingContext2D} context */
  #drawBrush(view, context) {
    const { pointer, tool, brush, viewer } = this.tools;
    if (pointer?.view !== view || (tool !== "paint" && tool !== "erase")) return;
    const target = brush.stroke
      ? brush.stroke.id
      : brush.targetAt(view.voxelAt(pointer.x, pointer.y), tool === "erase");
    const radius = Math.max(2, brush.radius * viewer.scene.state.scale);
    context.strokeStyle = target ? getCssColor(target) : SKETCH_COLOR;
    context.setLineDash(tool === "erase" ? [4, 3] : []);
    context.beginPath();
    context.arc(pointer.x, pointer.y, radius, 0, 2 * Math.PI);
    context.stroke();
    context.setLineDash([]);
    const text = target === null ? "no object selected" : target === 0 ? "new object" : `object ${target}`;
    context.font = "12px system-ui, sans-serif";
    context.strokeStyle = "#000c";
    context.lineWidth = 3;
    context.strokeText(text, pointer.x + radius + 5, pointer.y + 4);
    context.fillText(text, pointer.x + radius + 5, pointer.y + 4);
  }
}
