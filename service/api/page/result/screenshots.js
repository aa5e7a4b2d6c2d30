/** Screenshots of the views. */

/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */

const GAP_PIXELS = 6;
const THUMBNAIL = { width: 96, height: 72 };

/** Draw the three slices with their outlines, as displayed. @param {Viewer} viewer @returns {Promise<Blob>} PNG */
export function drawScreenshot({ views, scene }) {
  const [xy, xz, zy] = views;
  const canvas = document.createElement("canvas");
  canvas.width = xy.base.width + GAP_PIXELS + zy.base.width;
  canvas.height = xy.base.height + GAP_PIXELS + xz.base.height;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.fillRect(0, 0, canvas.width, canvas.height);
  for (const [view, x, y] of /** @type {[typeof xy, number, number][]} */ ([
    [xy, 0, 0],
    [zy, xy.base.width + GAP_PIXELS, 0],
    [xz, 0, xy.base.height + GAP_PIXELS],
  ])) {
    context.globalAlpha = 1;
    context.drawImage(view.base, x, y);
    context.globalAlpha = scene.state.opacity;
    if (scene.state.showObjects) context.drawImage(view.over, x, y);
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
  const { base, over } = views[0];
  const small = Object.assign(document.createElement("canvas"), THUMBNAIL);
  const context = /** @type {CanvasRenderingContext2D} */ (small.getContext("2d"));
  const scale = Math.max(small.width / base.width, small.height / base.height);
  const [x, y] = [(small.width - base.width * scale) / 2, (small.height - base.height * scale) / 2];
  for (const canvas of [base, over]) context.drawImage(canvas, x, y, base.width * scale, base.height * scale);
  return small.toDataURL("image/jpeg", 0.7);
}
