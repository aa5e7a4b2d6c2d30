/** Description of a model: picture, purpose, training data, licence and citations. */

import { element, formatMessage } from "../core/elements.js";
import { formatNumber } from "../core/format.js";
import { showPicture } from "../core/requests.js";

/** @typedef {import("openapi").ModelInfo} Model */

/** Reference to the file with the description of a model, which users of the web UI do not have. */
const README_REFERENCE = /; see README\.md(?=\.?$)/;

/** Create the picture of a model, or a text that states why there is none. @param {Model} model @param {AbortSignal} signal */
export function createPicture(model, signal) {
  const image = element("img", { alt: `Objects that ${model.name} finds in its sample`, hidden: true });
  const placeholder = element("p", { class: "muted small" }, "Loading the picture");
  if (model.picture) loadPicture(model.picture, image, placeholder, signal);
  else placeholder.textContent = "No picture: the model has no sample.";
  return element(
    "figure",
    { class: "gallery-picture" },
    element("div", { class: "gallery-image" }, image, placeholder),
    element("figcaption", { class: "muted small" }, "Sample of the model"),
  );
}

/** @param {string} path @param {HTMLImageElement} image @param {HTMLElement} placeholder @param {AbortSignal} signal */
async function loadPicture(path, image, placeholder, signal) {
  try {
    await showPicture(path, image, signal);
    placeholder.hidden = true;
  } catch (error) {
    placeholder.replaceChildren(formatMessage(error));
  }
}

/** Create the list of facts about a model. @param {Model} model */
export function createFacts(model) {
  const facts = [
    ["Expects", describeInput(model)],
    ["Finds", describeOutput(model)],
    ["Trained on", model.training_data?.replace(README_REFERENCE, "")],
    ["Licence", model.licence],
    ["Authors", model.authors.join(", ")],
  ];
  const terms = facts.flatMap(([name, text]) => (text ? [element("dt", {}, name), element("dd", {}, text)] : []));
  return element(
    "dl",
    { class: "gallery-facts small" },
    ...terms,
    ...(model.cite.length > 0 ? [element("dt", {}, "Cite"), element("dd", {}, ...model.cite.map(createCitation))] : []),
  );
}

/** @param {Model["cite"][number]} citation */
function createCitation({ text, url }) {
  if (url === null) return element("p", {}, text);
  return element("p", {}, element("a", { href: url, target: "_blank", rel: "noreferrer" }, text));
}

/** @param {Model} model */
function describeInput({ input }) {
  if (!input) return "";
  const names = input.channel_names.filter(Boolean).join(", ");
  const channels = input.channels === 1 ? "one channel" : `${input.channels} channels`;
  const channelText = names ? `${channels} (${names})` : channels;
  if (input.diameter === null) return `${channelText}, at the original resolution`;
  return `${channelText}, objects about ${formatNumber(input.diameter)} voxels wide; stacks are resampled to this size`;
}

/** @param {Model} model */
function describeOutput({ decoding, outputs }) {
  const isClasses = decoding === "classes" || decoding === "regions";
  return isClasses ? `classes without separate objects: ${outputs.join(", ")}` : "separate objects";
}
