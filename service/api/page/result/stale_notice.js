/** Notice that the settings were changed after the displayed result was segmented. */

import { button, element } from "../core/elements.js";
import { SETTING_TITLES } from "../core/terminology.js";

/** @typedef {import("openapi").JobReport} Job */

/** Parameters of a job that are not settings. */
const OTHER_PARAMETERS = ["stack", "measurements"];

/** List the titles of the settings that differ from those of a job. @param {Job} job @param {Record<string, string>} settings current settings by parameter name @returns {string[]} */
export function listChangedSettings(job, settings) {
  const used = { ...job.parameters, model: job.parameters.model ?? job.model.split("/")[0] };
  const names = new Set([...Object.keys(used), ...Object.keys(settings)]);
  return [...names]
    .filter((name) => !OTHER_PARAMETERS.includes(name))
    .filter((name) => !areEqual(String(Reflect.get(used, name) ?? ""), settings[name] ?? ""))
    .map((name) => SETTING_TITLES[name] ?? name);
}

/** @param {string} first @param {string} second @returns {boolean} whether two values of a parameter are equal, as 0.5 and 0.50 are */
function areEqual(first, second) {
  return first === second || (first !== "" && second !== "" && Number(first) === Number(second));
}

/** The notice, with a button that segments the stack again. */
export class StaleNotice {
  /** @param {() => unknown} segmentAgain */
  constructor(segmentAgain) {
    this.text = element("p");
    this.root = element(
      "div",
      { class: "stale-notice", role: "status", hidden: true },
      this.text,
      button("Segment again", segmentAgain, "primary"),
    );
  }

  /** @param {string[]} changedSettings titles of the settings that have changed since the segmentation */
  show(changedSettings) {
    this.root.hidden = changedSettings.length === 0;
    this.text.textContent = `This result is from before you changed: ${changedSettings.join(", ")}.`;
  }
}
