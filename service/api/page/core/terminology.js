/** Functions that rewrite messages from the service in the terms of the web UI: titles of settings, and lengths in x, y, z order. */

/** Titles of the settings in the web UI by parameter name. @type {Record<string, string>} */
export const SETTING_TITLES = {
  model: "Model",
  scene: "Scene",
  channel: "Channel to segment",
  time: "Time point",
  axes: "Axes",
  voxel_size: "Voxel size",
  allow_incomplete: "Missing planes",
  diameter: "Object diameter",
  threshold: "Foreground threshold",
  minimum_size: "Minimum object size",
  min_confidence: "Minimum confidence",
  border: "Objects at the border",
  fill_holes: "Holes in objects",
  quality: "Quality",
  link: "Tracking",
  overlap: "Window overlap",
  skip_below: "Skip windows darker than",
};
/** Parameter values that the web UI displays differently. @type {Record<string, string>} */
const DISPLAYED_VALUES = {
  "diameter=none": "original resolution",
  "diameter=auto": "estimated from the stack",
  "voxel_size=Z,Y,X": "",
  "allow_incomplete=true": "use the planes that are present",
};
const PARAMETER_PATTERN = new RegExp(`\\b(${Object.keys(SETTING_TITLES).join("|")})=((?:[\\w:-]|[.,](?=\\w))*)`, "g");
const ZYX_LENGTHS_PATTERN = /([\d.]+),([\d.]+),([\d.]+)(px|um)\b/g;
const ZYX_SHAPE_PATTERN = /\b(\d+) x (\d+) x (\d+)\b/g;
const CONFIDENCE_PATTERN = /\(confidence (\d\.\d+)\)/g;

/** Describe a parameter in the terms of the web UI. @param {string} name of the parameter @param {string} value of the parameter, "" to return only the title */
export function describeSetting(name, value) {
  const displayedValue = DISPLAYED_VALUES[`${name}=${value}`] ?? value;
  const valueWithUnit = name === "voxel_size" && displayedValue ? `${displayedValue}um` : displayedValue;
  return valueWithUnit
    ? `${SETTING_TITLES[name] ?? name}: ${formatLengths(valueWithUnit)}`
    : (SETTING_TITLES[name] ?? name);
}

/** Rewrite a message from the service: replace parameters with the titles of settings, and convert lengths to x, y, z order. @param {string} text */
export function toPageTerms(text) {
  const textWithTitles = text.replace(PARAMETER_PATTERN, (_, name, value) => `“${describeSetting(name, value)}”`);
  return formatLengths(textWithTitles)
    .replace(ZYX_SHAPE_PATTERN, "$3 × $2 × $1")
    .replace(CONFIDENCE_PATTERN, (_, fraction) => `(confidence ${Math.round(fraction * 100)}%)`)
    .replace(" (docs/training.md)", "");
}

/** Convert lengths to x, y, z order and to the units of the web UI. @param {string} text */
export function formatLengths(text) {
  return text
    .replace(ZYX_LENGTHS_PATTERN, (_, z, y, x, unit) => `${x} × ${y} × ${z}${unit}`)
    .replace(/(\d) ?px\b/g, "$1 voxels")
    .replace(/(\d) ?um\b/g, "$1 µm");
}
