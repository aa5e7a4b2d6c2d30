/** Dialog with the settings of one stack of a batch: axes, scene, channel, time points and voxel size. */

import { button, element, formatMessage, openDialog } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import { toPageTerms } from "../core/terminology.js";
import { MetadataControls } from "../stack/metadata_controls.js";
import { fetchMiddlePlane, fetchShape, makePlaneParameters } from "../volumes/planes.js";
import { getPhase, getRequestParameters } from "./entries.js";

/** @typedef {import("./batch.js").Batch} Batch */
/** @typedef {import("./entries.js").Entry} Entry */

const MAX_PREVIEW_EDGE = 160;

/** Open the dialog. Changes take effect immediately. @param {Batch} batch @param {Entry} entry @param {import("openapi").ModelInfo[]} models */
export function openEntryDialog(batch, entry, models) {
  const closeAbort = new AbortController();
  const similarEntries = listSimilarEntries(batch, entry);
  const similarCheckbox = element("input", { type: "checkbox", checked: true });
  const controls = new MetadataControls(models, (changes) =>
    batch.setOwnParameters([entry, ...(similarCheckbox.checked ? similarEntries : [])], changes),
  );
  controls.root.classList.add("controls");
  controls.fetchers = createFetchers(entry, () => getRequestParameters(batch, entry), closeAbort.signal);
  const problemText = element("p", { role: "status" });
  const resetButton = button("Reset to the settings for all stacks", () => resetParameters(batch, entry), "link");
  let shown = "";
  const update = () => {
    const parameters = getRequestParameters(batch, entry);
    const key = JSON.stringify([parameters, entry.parameters, entry.inspection, entry.problem]);
    if (key === shown) return;
    shown = key;
    showControls(controls, problemText, entry, parameters);
    resetButton.hidden = Object.keys(entry.parameters).length === 0;
  };
  // The first control gets the focus when the dialog opens.
  update();
  const dialog = openDialog(
    entry.path,
    element(
      "div",
      { class: "dialog-form" },
      problemText,
      controls.root,
      similarEntries.length > 0 &&
        element(
          "label",
          { class: "inline-label" },
          similarCheckbox,
          `Also for the ${formatCount(similarEntries.length, "other stack")} with this question`,
        ),
      element(
        "div",
        { class: "row between" },
        resetButton,
        button("Close", () => dialog.close(), "primary"),
      ),
    ),
  );
  batch.addEventListener("change", update, { signal: closeAbort.signal });
  dialog.addEventListener("close", () => closeAbort.abort());
}

/** @param {MetadataControls} controls @param {HTMLElement} problemText @param {Entry} entry @param {import("./entries.js").Parameters} parameters of the request */
function showControls(controls, problemText, { problem, inspection }, parameters) {
  const isQuestion =
    problem !== null && (controls.askForIncompleteStack(problem) || controls.askForAxes(problem, parameters));
  if (!isQuestion && inspection) controls.show(inspection.file, parameters, inspection.file.example_scene !== null);
  const text = isQuestion ? "" : (problem?.message ?? toPageTerms(inspection?.problem ?? ""));
  problemText.replaceChildren(formatMessage(text));
  problemText.hidden = text === "";
  problemText.classList.toggle("warning-text", text !== "");
}

/** @param {Batch} batch @param {Entry} entry @returns {Entry[]} the other stacks with the same open question */
function listSimilarEntries(batch, entry) {
  if (getPhase(entry) !== "question") return [];
  return batch.stacks.filter(
    (other) => other !== entry && getPhase(other) === "question" && getQuestion(other) === getQuestion(entry),
  );
}

/** @param {Entry} entry @returns {string} */
function getQuestion({ problem, inspection }) {
  if (problem) return JSON.stringify([problem.slug, problem.message]);
  return JSON.stringify([inspection?.problem, inspection?.file.channels, inspection?.file.scenes]);
}

/** @param {Batch} batch @param {Entry} entry */
function resetParameters(batch, entry) {
  const changes = Object.fromEntries(Object.keys(entry.parameters).map((name) => [name, ""]));
  batch.setOwnParameters([entry], changes);
}

/** @param {Entry} entry @param {() => import("./entries.js").Parameters} getParameters @param {AbortSignal} signal @returns {import("../stack/metadata_controls.js").PreviewFetchers} */
function createFetchers(entry, getParameters, signal) {
  const url = `stacks/${entry.stack}/planes`;
  return {
    fetchChannel: (channel) => {
      const { file } = /** @type {import("openapi").Inspection} */ (entry.inspection);
      const [, z, y, x] = file.shape;
      const parameters = makePlaneParameters(file, getParameters(), file.time_points?.[0] ?? 0, channel);
      return fetchMiddlePlane({ url, parameters, fullShape: [z, y, x] }, MAX_PREVIEW_EDGE, signal);
    },
    fetchScene: async (scene) => {
      const source = { url, parameters: { scene, time: 0, allow_incomplete: getParameters().allow_incomplete } };
      const fullShape = await fetchShape(source, signal);
      return fetchMiddlePlane({ ...source, fullShape }, MAX_PREVIEW_EDGE, signal);
    },
  };
}
