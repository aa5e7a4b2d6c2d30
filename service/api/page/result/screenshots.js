/** Functions that draw screenshots of the views. */

/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */

const GAP_PIXELS = 6;
const THUMBNAIL_SIZE = { width: 96, height: 72 };

/** Draw the three slices and their outlines as currently displayed. @param {Viewer} viewer @returns {Promise<Blob>} PNG */
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
