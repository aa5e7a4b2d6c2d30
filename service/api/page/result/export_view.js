/** Export of a result as files, a screenshot of the views, and scripts that repeat the request. */

import { button, downloadBlob, element } from "../core/elements.js";
import { formatDate } from "../core/format.js";
import { buildQuery, request } from "../core/requests.js";

/** @typedef {import("openapi").JobReport} Job */

/**
 * Create the content of the Export tab.
 * @param {Job} job @param {string} name file name of the stack @param {boolean} hasTable whether the result has a table of objects
 * @param {boolean} isTemporary whether the service deletes results when it stops
 * @param {() => Promise<Blob>} takeScreenshot returns a PNG
 */
export function createExportView(job, name, hasTable, isTemporary, takeScreenshot) {
  const stem = (name || "stack").replace(/(\.ome)?\.(tiff?|ozx|zarr|zarr\.zip|zip)$/i, "");
  const statusText = element("p", { class: "muted small", role: "status" });
  /** @param {string} text @param {string} mediaType @param {string} suffix */
  const createExportButton = (text, mediaType, suffix) =>
    button(
      text,
      async () => {
        statusText.textContent = "Downloading the file";
        try {
          downloadBlob(
            await (await request(`jobs/${job.id}/result`, { headers: { Accept: mediaType } })).blob(),
            stem + suffix,
          );
          statusText.textContent = `Saved ${stem}${suffix}`;
        } catch (error) {
          statusText.textContent = /** @type {Error} */ (error).message;
        }
      },
      "secondary",
    );
  return element(
    "div",
    { class: "export" },
    element(
      "div",
      { class: "row wrap" },
      createExportButton("Labels (OME-TIFF)", "image/tiff", "_labels.ome.tif"),
      hasTable && createExportButton("Table (CSV)", "text/csv", "_objects.csv"),
      !job.time_points && createExportButton("Labels (NIfTI)", "application/x-nifti", "_labels.nii.gz"),
      !job.time_points && createExportButton("Labels (NumPy)", "application/x-npy", "_labels.npy"),
      button("Screenshot (PNG)", async () => downloadBlob(await takeScreenshot(), `${stem}_view.png`), "secondary"),
    ),
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
    ...Object.entries(createScripts(job, name || "stack.tif")).map(([language, text]) => createSnippet(language, text)),
  );
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
    { class: "snippet", open: language === "curl" },
    element("summary", {}, language),
    element("div", { class: "snippet-body" }, element("pre", { tabIndex: 0 }, text), copyButton),
  );
}

/** Create scripts that repeat the request of a job. @param {Job} job @param {string} stackFile file name of the stack @returns {Record<string, string>} script by language */
export function createScripts(job, stackFile) {
  const { stack: _stack, measurements, ...parameters } = job.parameters;
  const stem = stackFile.replace(/(\.ome)?\.(tiff?|ozx|zarr|zarr\.zip|zip)$/i, "");
  const query = buildQuery({ ...parameters, measurements });
  const url = `${location.origin}${location.pathname.replace(/[^/]*$/, "")}segment${query && "?"}${query}`;
  const labelsFile = `${stem}_labels${measurements ? ".zip" : ".ome.tif"}`;
  const options = Object.entries(parameters).map(
    ([name, value]) => `--${name.replaceAll("_", "-")} ${quoteForShell(String(value))}`,
  );
  if (measurements) options.push(`--measurements ${quoteForShell(`${stem}_objects.csv`)}`);
  return {
    curl: `curl -sS --fail-with-body --data-binary @${quoteForShell(stackFile)} -H 'Content-Type: image/tiff' \\\n  ${quoteForShell(url)} -o ${quoteForShell(labelsFile)}`,
    Python: [
      "import urllib.request",
      "",
      `with open(${quoteForPython(stackFile)}, "rb") as stack:`,
      "    request = urllib.request.Request(",
      `        ${quoteForPython(url)},`,
      '        data=stack.read(), headers={"Content-Type": "image/tiff"})',
      `with urllib.request.urlopen(request) as response, open(${quoteForPython(labelsFile)}, "wb") as labels:`,
      "    labels.write(response.read())",
    ].join("\n"),
    stackseg: ["stackseg segment", quoteForShell(stackFile), quoteForShell(`${stem}_labels.ome.tif`), ...options].join(
      " ",
    ),
  };
}

/** @param {string} text */
function quoteForShell(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

/** @param {string} text */
function quoteForPython(text) {
  return JSON.stringify(text);
}
