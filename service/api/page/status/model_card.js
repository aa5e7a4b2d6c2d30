/** Models: their state, how they compute, and what was tried for it. */

import { button, element } from "../core/elements.js";
import { counted, number, size } from "../core/format.js";
import { secondsOf, table } from "./card.js";

/** @typedef {import("openapi").EngineReport} Engine */
/** @typedef {Omit<import("openapi").ModelInfo, "devices"> & {devices: Omit<import("openapi").Loaded, "used">[]}} Model */
/** @typedef {import("openapi").Trial} Trial */

const PLANNED = /** @type {Record<string, string>} */ ({
  fixed: "As the configuration says.",
  "known-order": "First of the fastest known for this hardware whose labels agree with the plain FP32 network.",
  tuned: "Fastest of all that were tried here and whose labels agree with the plain FP32 network.",
});

/** @param {Model} model @param {boolean} isDefault @param {Set<string>} opened @param {(name: string) => void} remove */
export function drawModel({ name, version, state, engine, problem, devices, removable }, isDefault, opened, remove) {
  const where = devices.map(({ device, bytes }) => `${size(bytes)} on ${device}`).join(", ");
  const idle = state === "unloaded" ? "Loaded when a request asks for it." : "";
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
        [version && `version ${version}`, isDefault && "default", where].filter(Boolean).join(" · "),
      ),
      removable && button("Delete", () => remove(name), "link"),
    ),
    problem !== null && element("p", { class: "warning-text" }, problem),
    engine === null ? idle !== "" && element("p", { class: "muted" }, idle) : drawEngine(name, engine, opened),
  );
}

/** @param {string} name of the model @param {Engine} engine @param {Set<string>} opened */
function drawEngine(name, engine, opened) {
  const { roi_size, sw_batch_size, streams, planned, cached, trials, warnings } = engine;
  const how = [engine.engine, engine.precision.toUpperCase(), engine.compile_mode].filter(Boolean).join(", ");
  const batch = `${counted(sw_batch_size, "window")} of ${roi_size.join(" × ")} at a time, ${counted(streams, "stream")}`;
  const tried = element(
    "details",
    {
      open: opened.has(name),
      ontoggle: () => (tried.open ? opened.add(name) : opened.delete(name)),
    },
    element("summary", {}, `What was tried (${trials.length})`),
    drawTrials(name, trials),
  );
  return element(
    "div",
    { class: "card-body" },
    element("p", {}, element("strong", {}, how), `; ${batch}; ready after ${secondsOf(engine.warm_up_seconds)}`),
    element("p", { class: "muted" }, PLANNED[planned] ?? planned, cached && " Known from an earlier start."),
    warnings.length > 0 &&
      element("ul", { class: "notes" }, ...warnings.map((text) => element("li", { class: "warning" }, text))),
    trials.length > 0 && tried,
  );
}

/** @param {string} name @param {Trial[]} trials */
function drawTrials(name, trials) {
  return table(
    `What was tried for ${name}`,
    ["Engine", "Precision", "Windows/s", "Labels that differ", "Verdict"],
    trials.map(({ choice, verdict, windows_per_second, difference }) => [
      [choice.engine, choice.compile_mode].filter(Boolean).join(", "),
      choice.precision,
      windows_per_second === null ? "–" : number(windows_per_second),
      difference === null ? "–" : `${number(100 * difference, 2)} %`,
      verdict,
    ]),
  );
}
