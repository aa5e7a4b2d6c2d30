/** What went wrong, in a bar above the view. */

import { button, byId, element } from "./elements.js";
import { Problem } from "./requests.js";

/** @param {unknown} error @returns {boolean} whether something was given up because another view is shown */
export function isAbort(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

/** @param {unknown} error */
export function report(error) {
  if (isAbort(error)) return;
  const box = byId("problem");
  box.hidden = false;
  box.replaceChildren(
    element("span", {}, error instanceof Error ? error.message : String(error)),
    button("Close", hideReport, "quiet"),
  );
  if (!(error instanceof Problem)) console.error(error);
}

export function hideReport() {
  byId("problem").hidden = true;
}
