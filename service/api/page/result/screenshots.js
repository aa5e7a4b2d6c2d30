/** Functions that draw screenshots of the views. */

import { chooseScaleBar } from "../viewer/rulers.js";

/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */

const GAP_PIXELS = 6;
const THUMBNAIL_SIZE = { width: 96, height: 72 };

/** Draw the three slices, their outlines and a scale bar as currently displayed. @param {Viewer} viewer @returns {Promise<Blob>} PNG */
export function drawScreenshot({ views, scene }) {
  const [xy, xz, zy] = views;
  const canvas = document.createElement("canvas");
  canvas.width = xy.imageCanvas.width + GAP_PIXELS + zy.imageCanvas.width;
  canvas.height = xy.imageCanvas.height + GAP_PIXELS + xz.imageCanvas.height;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.fillRect(0, 0, canvas.width, canvas.height);
  for (const [view, x, y] of /** @type {[typeof xy, number, number][]} */ ([
    [xy, 0, 0],
    [zy, xy.imageCanvas.width + GAP_PIXELS, 0],
    [xz, 0, xy.imageCanvas.height + GAP_PIXELS],
  ])) {
    context.globalAlpha = 1;
    context.drawImage(view.imageCanvas, x, y);
    context.globalAlpha = scene.state.opacity;
    if (scene.state.showObjects) context.drawImage(view.labelsCanvas, x, y);
  }
  context.globalAlpha = 1;
  drawScaleBar(context, chooseScaleBar(scene.state), xy.imageCanvas, xy.pixelRatio ?? 1);
  return new Promise((resolve, reject) => {
    canvas.toBlob((blob) => {
      if (blob) resolve(blob);
      else reject(new Error("The browser could not create the screenshot."));
    }, "image/png");
  });
}

/** Draw a thumbnail of the XY view for the list of jobs. @param {Viewer} viewer @returns {string} data URL */
export function drawThumbnail({ views }) {
  const { imageCanvas, labelsCanvas } = views[0];
  const thumbnail = Object.assign(document.createElement("canvas"), THUMBNAIL_SIZE);
  const context = /** @type {CanvasRenderingContext2D} */ (thumbnail.getContext("2d"));
  const scale = Math.max(thumbnail.width / imageCanvas.width, thumbnail.height / imageCanvas.height);
  const [x, y] = [
    (thumbnail.width - imageCanvas.width * scale) / 2,
    (thumbnail.height - imageCanvas.height * scale) / 2,
  ];
  for (const canvas of [imageCanvas, labelsCanvas])
    context.drawImage(canvas, x, y, imageCanvas.width * scale, imageCanvas.height * scale);
  return thumbnail.toDataURL("image/jpeg", 0.7);
}

/**
 * Draw a scale bar in the lower right corner of a view, in white with a black outline.
 * @param {CanvasRenderingContext2D} context @param {{pixels: number, text: string}} bar @param {HTMLCanvasElement} view
 * @param {number} ratio canvas pixels per CSS pixel
 */
function drawScaleBar(context, { pixels, text }, { width, height }, ratio) {
  const [right, bottom] = [width - 12 * ratio, height - 12 * ratio];
  context.fillStyle = "#000";
  context.fillRect(right - (pixels + 1) * ratio, bottom - 4 * ratio, (pixels + 2) * ratio, 5 * ratio);
  context.fillStyle = "#fff";
  context.fillRect(right - pixels * ratio, bottom - 3 * ratio, pixels * ratio, 3 * ratio);
  context.font = `${12 * ratio}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.lineWidth = 3 * ratio;
  context.lineJoin = "round";
  context.strokeStyle = "#000";
  const position = /** @type {const} */ ([right - (pixels * ratio) / 2, bottom - 8 * ratio]);
  context.strokeText(text, ...position);
  context.fillText(text, ...position);
}
