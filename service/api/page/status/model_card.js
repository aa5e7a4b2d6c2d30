/** Card with the state and engine of each model, and the engine configurations that were tested. */

import { button, element, formatMessage } from "../core/elements.js";
import { formatBytes, formatCount, formatNumber } from "../core/format.js";
import { createTable, formatSeconds } from "./card.js";

/** @typedef {import("openapi").EngineReport} Engine */
/** @typedef {Omit<import("openapi").ModelInfo, "devices"> & {devices: Omit<import("openapi").LoadedModel, "used">[]}} Model */
/** @typedef {import("openapi").Trial} Trial */

const SELECTION_REASONS = /** @type {Record<string, string>} */ ({
  fixed: "Set in the configuration.",
  "known-order":
    "The engine that is known to be the fastest on this hardware, among the engines whose labels agree with the FP32 labels of the original network.",
  tuned: "The fastest of the tested configurations whose labels agree with the FP32 labels of the original network.",
});

/** @param {Model} model @param {boolean} isDefault @param {Set<string>} expandedNames names of the models whose details are expanded @param {(name: string) => void} onremove called to delete the model */
export function createModelElement(
  { name, version, state, engine, problem, devices, removable },
  isDefault,
  expandedNames,
  onremove,
) {
  const memory = devices.map(({ device, bytes }) => `${formatBytes(bytes)} on ${device}`).join(", ");
  const hint = state === "unloaded" ? "The first request that uses this model loads it." : "";
  return element(
    "article",
    { class: "model" },
    element(
      "div",
      { class: "row" },
      element("h3", {}, name),
      element("span", { class: `state state-${state}` }, state),
      element(
        "span",
        { class: "muted" },
        [version && `version ${version}`, isDefault && "default", memory].filter(Boolean).join(" · "),
      ),
      removable && button("Delete", () => onremove(name), "link"),
    ),
    problem !== null && element("p", { class: "warning-text" }, formatMessage(problem)),
    engine === null
      ? hint !== "" && element("p", { class: "muted" }, hint)
      : createEngineElement(name, engine, expandedNames),
  );
}

/** @param {string} name of the model @param {Engine} engine @param {Set<string>} expandedNames */
function createEngineElement(name, engine, expandedNames) {
  const { roi_size, sw_batch_size, streams, planned, cached, trials, warnings } = engine;
  const configuration = [engine.engine, engine.precision.toUpperCase(), engine.compile_mode].filter(Boolean).join(", ");
  const batchText = `${formatCount(sw_batch_size, "window")} of ${roi_size.join(" × ")} at a time, ${formatCount(streams, "stream")}`;
  const details = element(
    "details",
    {
      open: expandedNames.has(name),
      ontoggle: () => (details.open ? expandedNames.add(name) : expandedNames.delete(name)),
    },
    element("summary", {}, `Tested configurations (${trials.length})`),
    createTrialsTable(name, trials),
  );
  return element(
    "div",
    { class: "card-body" },
    element(
      "p",
      {},
      element("strong", {}, configuration),
      `; ${batchText}; ready after ${formatSeconds(engine.warm_up_seconds)}`,
    ),
    element(
      "p",
      { class: "muted" },
      SELECTION_REASONS[planned] ?? planned,
      cached && " Reused from an earlier run of the service.",
    ),
    warnings.length > 0 &&
      element(
        "ul",
        { class: "notes" },
        ...warnings.map((text) => element("li", { class: "warning" }, formatMessage(text))),
      ),
    trials.length > 0 && details,
  );
}

/** @param {string} name @param {Trial[]} trials */
function createTrialsTable(name, trials) {
  return createTable(
    `Tested configurations of ${name}`,
    ["Engine", "Precision", "Windows/s", "Differing labels", "Verdict"],
    trials.map(({ choice, verdict, windows_per_second, difference }) => [
      [choice.engine, choice.compile_mode].filter(Boolean).join(", "),
      choice.precision,
      windows_per_second === null ? "–" : formatNumber(windows_per_second),
      difference === null ? "–" : `${formatNumber(100 * difference, 2)}%`,
      verdict,
    ]),
  );
}
