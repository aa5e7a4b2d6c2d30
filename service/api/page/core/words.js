/** What the service says in the words of this page: its settings instead of parameters, lengths along x, y, z. */

/** Titles of the page's settings by the names that they have as parameters of the service. @type {Record<string, string>} */
export const SETTINGS = {
  model: "Model",
  channel: "Channel to segment",
  time: "Time point",
  axes: "Axes",
  voxel_size: "Voxel size",
  diameter: "Object diameter",
  threshold: "Threshold of foreground",
  minimum_size: "Smallest object",
  min_confidence: "Least confidence",
  border: "Objects at the border",
  fill_holes: "Holes in objects",
  overlap: "Overlap of windows",
  skip_below: "Skip windows darker than",
};
/** Values that a setting of the page shows in other words. @type {Record<string, string>} */
const VALUES = { "diameter=none": "as sampled", "diameter=auto": "estimated from the stack", "voxel_size=Z,Y,X": "" };
const PARAMETER = new RegExp(`\\b(${Object.keys(SETTINGS).join("|")})=((?:[\\w:-]|[.,](?=\\w))*)`, "g");
const WIDTHS = /([\d.]+),([\d.]+),([\d.]+)(px|um)\b/g;
const LENGTHS = /\b(\d+) x (\d+) x (\d+)\b/g;
const CONFIDENCE = /\(confidence (\d\.\d+)\)/g;

/** @param {string} name of a parameter @param {string} value "" where it has yet to be chosen */
export function setting(name, value) {
  const known = VALUES[`${name}=${value}`] ?? value;
  const shown = name === "voxel_size" && known ? `${known}um` : known;
  return shown ? `${SETTINGS[name] ?? name}: ${widths(shown)}` : (SETTINGS[name] ?? name);
}

/** What the service says, with the page's settings in place of parameters, and lengths along x, y, z. @param {string} text */
export function pageWords(text) {
  const named = text.replace(PARAMETER, (_, name, value) => `“${setting(name, value)}”`);
  return widths(named)
    .replace(LENGTHS, "$3 × $2 × $1")
    .replace(CONFIDENCE, (_, share) => `(confidence ${Math.round(share * 100)} %)`)
    .replace(" (docs/models.md)", "");
}

/** Lengths of the service, which are along z, y, x, in the order and the units of this page. @param {string} text */
export function widths(text) {
  return text
    .replace(WIDTHS, (_, z, y, x, unit) => `${x} × ${y} × ${z}${unit}`)
    .replace(/(\d)px\b/g, "$1 voxels")
    .replace(/(\d)um\b/g, "$1 µm");
}
