/** The error bar above the view. */

import { button, byId, element, formatMessage } from "./elements.js";
import { Problem } from "./requests.js";

/** @param {unknown} error @returns {boolean} whether an AbortController canceled the work, for example because another view opened */
export function isAbort(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

/** Show an error in the error bar, unless it is a cancellation. @param {unknown} error */
export function showError(error) {
  if (isAbort(error)) return;
  const errorBar = byId("problem");
  errorBar.hidden = false;
  errorBar.replaceChildren(element("span", {}, formatMessage(error)), button("Close", hideError, "quiet"));
  if (!(error instanceof Problem)) console.error(error);
}

export function hideError() {
  byId("problem").hidden = true;
}
