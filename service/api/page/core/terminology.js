/** Functions that rewrite messages from the service in the terms of the web UI: titles of settings, and lengths in x, y, z order. */

import { formatTimeParameter, formatTimePoint } from "../volumes/time_points.js";

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
/** Indices of channels and scenes, which the web UI counts from 1. A longer number is a name, such as the wavelength 488. @type {Record<string, RegExp>} */
const INDEX_PATTERNS = { channel: /^\d{1,2}$/, scene: /^\d{1,5}$/ };
const PARAMETER_PATTERN = new RegExp(
  `\\b(${Object.keys(SETTING_TITLES).join("|")})=('[^']*'|(?:[\\w:-]|[.,](?=\\w))*)`,
  "g",
);
const ZYX_LENGTHS_PATTERN = /([\d.]+),([\d.]+),([\d.]+)(px|um)\b/g;
/** The width along y and x, in descriptions of an object diameter. */
const YX_WIDTH_PATTERN = /([\d.]+) x ([\d.]+) (?=(?:px|um) wide\b)/g;
const ZYX_SHAPE_PATTERN = /(?<! x )\b(\d+) x (\d+) x (\d+)\b(?! x )/g;
/** Numbers of time points in messages, such as in "Time points 2, 3". */
const TIME_POINTS_PATTERN = /(?<=\b[Tt]ime points? )\d+(?:, \d+)*/g;
/** Lists of channels or scenes in messages, such as in "2 channels: 0 (DAPI), 1". */
const ITEM_LIST_PATTERN =
  /(?<=\b(?:channels?|scenes?): )\d+(?: \(.*?\)(?=, \d|[.;]| and \d|$))?(?:, \d+(?: \(.*?\)(?=, \d|[.;]| and \d|$))?)*/g;
/** Indices in such lists. */
const LISTED_INDEX_PATTERN = /(?<=^|, )\d+(?= \(|, |$)/g;
/** Index of a scene that a file does not have. */
const MISSING_SCENE_PATTERN = /(?<=\bno scene )\d+\b/g;
const FIJI_ADVICE =
  "Open it in Fiji with %, set the voxel size under Image > Properties, and save it with File > Save As > Tiff.";
/** Menu items that replace a conversion in Python, by Python module. @type {Record<string, string>} */
const MENU_ADVICE = {
  nibabel: FIJI_ADVICE.replace("%", "File > Open"),
  nrrd: FIJI_ADVICE.replace("%", "File > Open"),
  mrcfile: FIJI_ADVICE.replace("%", "File > Import > Bio-Formats"),
  h5py: FIJI_ADVICE.replace("%", "File > Import > HDF5"),
  SimpleITK: FIJI_ADVICE.replace("%", "File > Open"),
  scipy:
    "Write its planes to one TIFF in MATLAB (imwrite, WriteMode append), and set the voxel size in Fiji under Image > Properties.",
  numpy: "Open it in napari with File > Open, and save the layer as a TIFF with File > Save Selected Layers.",
};
const CONFIDENCE_PATTERN = /\(confidence (\d\.\d+)\)/g;

/** Describe a parameter in the terms of the web UI. @param {string} name of the parameter @param {string} value of the parameter, "" to return only the title */
export function describeSetting(name, value) {
  const displayedValue = DISPLAYED_VALUES[`${name}=${value}`] ?? value;
  if (INDEX_PATTERNS[name]?.test(displayedValue)) return `${SETTING_TITLES[name]}: ${formatIndex(displayedValue)}`;
  if (name === "time" && displayedValue) return `${SETTING_TITLES.time}: ${formatTimeParameter(displayedValue)}`;
  const valueWithUnit = name === "voxel_size" && displayedValue ? `${displayedValue}um` : displayedValue;
  return valueWithUnit
    ? `${SETTING_TITLES[name] ?? name}: ${formatLengths(valueWithUnit)}`
    : (SETTING_TITLES[name] ?? name);
}

/** @param {string} index of a channel or scene @returns {string} its number in the web UI */
function formatIndex(index) {
  return String(Number(index) + 1);
}

/** Rewrite a message from the service: replace parameters with the titles of settings, and convert lengths to x, y, z order. @param {string} text */
export function toPageTerms(text) {
  const textWithTitles = replaceCommands(text).replace(
    PARAMETER_PATTERN,
    (_, name, value) => `“${describeSetting(name, value.replaceAll("'", ""))}”`,
  );
  return (
    formatLengths(textWithTitles.replace(YX_WIDTH_PATTERN, "$2 × $1 "))
      .replace(ZYX_SHAPE_PATTERN, "$3 × $2 × $1")
      .replace(CONFIDENCE_PATTERN, (_, fraction) => `(confidence ${Math.round(fraction * 100)}%)`)
      .replace(TIME_POINTS_PATTERN, (times) => times.replace(/\d+/g, (time) => formatTimePoint(Number(time))))
      .replace(ITEM_LIST_PATTERN, (items) => items.replace(LISTED_INDEX_PATTERN, formatIndex))
      .replace(MISSING_SCENE_PATTERN, formatIndex)
      .replace(" (docs/training.md)", "")
      .replace(/^The request has no file, or an empty one\..*$/s, "The file is empty. Copy or export it again.")
      .replace(/To use another one, set scene to its (?:name or )?index\./, "Select another one under “Scene”.")
      .replace(
        "train again with --partial-planes (partial_planes in requests).",
        "mark the planes in which every object is labeled, save the stack again, and train again.",
      )
      // The first bytes of a file of an unknown format.
      .replace(/, but with b(?:'[^']*'|"[^"]*")\. Send a /, ". Open a ")
  );
}

/** Replace shell commands and Python code in advice about a file with menu items. @param {string} text */
function replaceCommands(text) {
  return text
    .replace(/ Or convert it with Bio-Formats: .*$/s, "")
    .replace(
      / Or install the libraries for this format where StackSeg runs: pip install '[^']*'\./,
      " Or ask the operator of this service to install the libraries for this format.",
    )
    .replace(/Convert it in Python: import (\w+).*$/s, (advice, module) => MENU_ADVICE[module] ?? advice)
    .replace(/Unpack it first: .*$/s, "Unpack it first: right-click it in the file manager, and choose Extract.");
}

/** @param {string | null | undefined} diameter that a job used, such as `14,22,22px; estimated` @returns {string} "" if no diameter was used */
export function describeUsedDiameter(diameter) {
  return diameter ? `object diameter ${formatLengths(diameter).replace("; stated", "").replace("; ", ", ")}` : "";
}

/** Convert lengths to x, y, z order and to the units of the web UI. @param {string} text */
export function formatLengths(text) {
  return text
    .replace(ZYX_LENGTHS_PATTERN, (_, z, y, x, unit) => `${x} × ${y} × ${z}${unit}`)
    .replace(/(\d) ?px\b/g, "$1 voxels")
    .replace(/(\d) ?um\b/g, "$1 µm");
}
