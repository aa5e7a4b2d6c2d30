/** Button in the title bar that adds the displayed results to a project. */

import { byId } from "../core/elements.js";
import { showError } from "../core/error_bar.js";
import { openAddToProjectDialog } from "./project_dialogs.js";

/** @typedef {{id: string, name: string}} Result job id, and name of the stack */

/** Show the button, or hide it. @param {(() => Result[]) | null} listResults lists the displayed results when the button is pressed, null to hide the button */
export function offerProject(listResults) {
  const offerButton = byId("to-project");
  offerButton.hidden = listResults === null;
  offerButton.onclick = () => {
    const results = listResults?.() ?? [];
    if (results.length > 0) openAddToProjectDialog(results).catch(showError);
    else showError(new Error("There are no results yet. Segment the stacks first."));
  };
}
