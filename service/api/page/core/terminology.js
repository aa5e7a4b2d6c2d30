/** Translation of the service's messages into the terms of the web UI: titles of settings, and lengths in x, y, z order. */

/** Titles of the settings in the web UI by parameter name. @type {Record<string, string>} */
export const SETTING_TITLES = {
  model: "Model",
  channel: "Channel to segment",
  time: "Time point",
  axes: "Axes",
  voxel_size: "Voxel size",
  diameter: "Object diameter",
  threshold: "Foreground threshold",
  minimum_size: "Minimum object size",
  min_confidence: "Minimum confidence",
  border: "Objects at the border",
  fill_holes: "Holes in objects",
  overlap: "Window overlap",
  skip_below: "Skip windows darker than",
};
/** Parameter values that the web UI displays differently. @type {Record<string, string>} */
const DISPLAYED_VALUES = {
  "diameter=none": "original resolution",
  "diameter=auto": "estimated from the stack",
  "voxel_size=Z,Y,X": "",
};
const PARAMETER = new RegExp(`\\b(${Object.keys(SETTING_TITLES).join("|")})=((?:[\\w:-]|[.,](?=\\w))*)`, "g");
const ZYX_LENGTHS = /([\d.]+),([\d.]+),([\d.]+)(px|um)\b/g;
const ZYX_SHAPE = /\b(\d+) x (\d+) x (\d+)\b/g;
const CONFIDENCE = /\(confidence (\d\.\d+)\)/g;

/** Describe a parameter as the web UI shows it. @param {string} name of the parameter @param {string} value "" if it is not selected yet */
export function describeSetting(name, value) {
  const displayed = DISPLAYED_VALUES[`${name}=${value}`] ?? value;
  const withUnit = name === "voxel_size" && displayed ? `${displayed}um` : displayed;
  return withUnit ? `${SETTING_TITLES[name] ?? name}: ${formatLengths(withUnit)}` : (SETTING_TITLES[name] ?? name);
}

/** Translate a message of the service: parameters to settings, z, y, x lengths to x, y, z. @param {string} text */
export function toPageTerms(text) {
  const translated = text.replace(PARAMETER, (_, name, value) => `“${describeSetting(name, value)}”`);
  return formatLengths(translated)
    .replace(ZYX_SHAPE, "$3 × $2 × $1")
    .replace(CONFIDENCE, (_, fraction) => `(confidence ${Math.round(fraction * 100)}%)`)
    .replace(" (docs/models.md)", "");
}

/** Convert lengths from the z, y, x order and the units of the service to those of the web UI. @param {string} text */
export function formatLengths(text) {
  return text
    .replace(ZYX_LENGTHS, (_, z, y, x, unit) => `${x} × ${y} × ${z}${unit}`)
    .replace(/(\d) ?px\b/g, "$1 voxels")
    .replace(/(\d) ?um\b/g, "$1 µm");
}
