/** Export of a result as files, a screenshot of the views, and scripts that repeat the request. */

import { button, downloadBlob, element, formatMessage, redraw } from "../core/elements.js";
import { formatDate } from "../core/format.js";
import { hasKey, request } from "../core/requests.js";
import { createScripts, KEY_VARIABLE } from "./export_scripts.js";

/** @typedef {import("openapi").JobReport} Job */

/**
 * The displayed objects of a result, which the files contain.
 * @typedef {object} ExportContent
 * @property {string} description of the displayed objects
 * @property {string} filterQuery query string that selects the displayed objects
 * @property {{labels: (kind: import("../correct/correct_view.js").LabelsKind) => Blob | Promise<Blob>, table: () => Blob} | null} corrected functions that encode the displayed objects if they are corrected, otherwise null
 */

/**
 * Create the content of the Export tab.
 * @param {Job} job @param {string} name file name of the stack @param {boolean} isTemporary whether the service deletes results when it stops
 * @param {() => Promise<Blob>} takeScreenshot returns a PNG
 * @returns {{root: HTMLElement, show: (content: ExportContent) => void}} show: called when other objects are displayed
 */
export function createExportView(job, name, isTemporary, takeScreenshot) {
  const stem = (name || "stack").replace(/(\.ome)?\.(tiff?|ozx|zarr|zarr\.zip|zip)$/i, "");
  const contentText = element("p", { id: "export-content" });
  const statusText = element("p", { class: "muted small", role: "status" });
  const fileButtons = element("div", { class: "row wrap" });
  /** @param {string} text @param {string} suffix @param {() => Blob | Promise<Blob>} createFile */
  const createButton = (text, suffix, createFile) =>
    button(
      text,
      async () => {
        statusText.textContent = "Preparing the file";
        try {
          downloadBlob(await createFile(), stem + suffix);
          statusText.textContent = `Saved ${stem}${suffix}`;
        } catch (error) {
          statusText.replaceChildren(formatMessage(error));
        }
      },
      "secondary",
    );
  /** @param {string} mediaType @param {string} filterQuery */
  const download = async (mediaType, filterQuery) => {
    const url = `jobs/${job.id}/result${filterQuery && "?"}${filterQuery}`;
    return (await request(url, { headers: { Accept: mediaType } })).blob();
  };
  /** @param {ExportContent} content */
  const show = ({ description, filterQuery, corrected }) => {
    contentText.textContent = description;
    statusText.textContent = "";
    const keyNote = hasKey() ? ` curl and Python read your API key from the environment variable ${KEY_VARIABLE}.` : "";
    scriptsText.textContent = corrected
      ? `The scripts segment the stack again, without your corrections.${keyNote}`
      : `The scripts segment the stack again, with the same settings.${keyNote}`;
    const hasTable = job.objects !== null && job.parameters.measurements === "zip";
    const buttons = corrected
      ? [
          createButton("Labels (OME-TIFF)", "_corrected.ome.tif", () => corrected.labels("ome.tif")),
          createButton("Table (CSV)", "_corrected.csv", corrected.table),
          createButton("Labels (NIfTI)", "_corrected.nii.gz", () => corrected.labels("nii.gz")),
          createButton("Labels (NumPy)", "_corrected.npy", () => corrected.labels("npy")),
        ]
      : [
          createButton("Labels (OME-TIFF)", "_labels.ome.tif", () => download("image/tiff", filterQuery)),
          hasTable && createButton("Table (CSV)", "_objects.csv", () => download("text/csv", filterQuery)),
          ...(job.time_points
            ? []
            : [
                createButton("Labels (NIfTI)", "_labels.nii.gz", () => download("application/x-nifti", filterQuery)),
                createButton("Labels (NumPy)", "_labels.npy", () => download("application/x-npy", filterQuery)),
              ]),
        ];
    redraw(fileButtons, () => [...buttons, createButton("Screenshot (PNG)", "_view.png", takeScreenshot)]);
    redraw(scripts, () =>
      Object.entries(createScripts(job, name || "stack.tif", corrected ? "" : filterQuery, hasKey())).map(
        ([language, text]) => createSnippet(language, text),
      ),
    );
  };
  const scripts = element("div", { class: "scripts" });
  const scriptsText = element("p", { class: "muted small" });
  const root = element(
    "div",
    { class: "export" },
    contentText,
    fileButtons,
    statusText,
    job.expires &&
      element(
        "p",
        { class: "muted small" },
        isTemporary
          ? "The service deletes this result when it stops or restarts. Export what you need."
          : `The service stores this result until ${formatDate(job.expires)}, or until its space is needed.`,
      ),
    element("h3", {}, "Repeat with a script"),
    scriptsText,
    scripts,
  );
  return { root, show };
}

/** Create an expandable section with a script and a copy button. @param {string} language @param {string} text */
function createSnippet(language, text) {
  const copyButton = button(
    "Copy",
    async () => {
      await navigator.clipboard?.writeText(text).catch(() => undefined);
      copyButton.textContent = "Copied";
      setTimeout(() => (copyButton.textContent = "Copy"), 1500);
    },
    "quiet",
  );
  return element(
    "details",
    { class: "snippet" },
    element("summary", {}, language),
    element("div", { class: "snippet-body" }, element("pre", { tabIndex: 0 }, text), copyButton),
  );
}
