/** What can be taken from a result: files, a picture of the views, and the request in three languages. */

import { button, element, save } from "../core/elements.js";
import { day } from "../core/format.js";
import { queryOf, request } from "../core/requests.js";

/** @typedef {import("openapi").JobReport} Job */

/**
 * @param {Job} job @param {string} name of the stack's file @param {boolean} hasTable
 * @param {() => Promise<Blob>} picture
 */
export function takeView(job, name, hasTable, picture) {
  const stem = (name || "stack").replace(/(\.ome)?\.(tiff?|ozx|zarr|zarr\.zip|zip)$/i, "");
  const status = element("p", { class: "muted small", role: "status" });
  /** @param {string} text @param {string} accept @param {string} suffix */
  const take = (text, accept, suffix) =>
    button(
      text,
      async () => {
        status.textContent = "Fetching the file";
        try {
          save(await (await request(`jobs/${job.id}/result`, { headers: { Accept: accept } })).blob(), stem + suffix);
          status.textContent = `Saved ${stem}${suffix}`;
        } catch (error) {
          status.textContent = /** @type {Error} */ (error).message;
        }
      },
      "secondary",
    );
  return element(
    "div",
    { class: "take" },
    element(
      "div",
      { class: "row wrap" },
      take("Labels, OME-TIFF", "image/tiff", "_labels.ome.tif"),
      hasTable && take("Table, CSV", "text/csv", "_objects.csv"),
      !job.time_points && take("NIfTI", "application/x-nifti", "_labels.nii.gz"),
      !job.time_points && take("NumPy", "application/x-npy", "_labels.npy"),
      button("Picture of the view, PNG", async () => save(await picture(), `${stem}_view.png`), "secondary"),
    ),
    status,
    job.expires &&
      element("p", { class: "muted small" }, `The service keeps this result until ${day(job.expires)} at the latest.`),
    element("h3", {}, "The same request"),
    ...Object.entries(lines(job, name || "stack.tif")).map(([language, text]) => snippet(language, text)),
  );
}

/** @param {string} language @param {string} text */
function snippet(language, text) {
  const copy = button(
    "Copy",
    async () => {
      await navigator.clipboard?.writeText(text).catch(() => undefined);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    },
    "quiet",
  );
  return element(
    "details",
    { class: "snippet", open: language === "curl" },
    element("summary", {}, language),
    element("div", { class: "snippet-body" }, element("pre", { tabIndex: 0 }, text), copy),
  );
}

/** @param {Job} job @param {string} file @returns {Record<string, string>} */
export function lines(job, file) {
  const { stack: _stack, measurements, ...parameters } = job.parameters;
  const stem = file.replace(/(\.ome)?\.(tiff?|ozx|zarr|zarr\.zip|zip)$/i, "");
  const query = queryOf({ ...parameters, measurements });
  const address = `${location.origin}${location.pathname.replace(/[^/]*$/, "")}segment${query && "?"}${query}`;
  const labels = `${stem}_labels${measurements ? ".zip" : ".ome.tif"}`;
  const options = Object.entries(parameters).map(
    ([name, value]) => `--${name.replaceAll("_", "-")} ${shell(String(value))}`,
  );
  if (measurements) options.push(`--measurements ${shell(`${stem}_objects.csv`)}`);
  return {
    curl: `curl -sS --fail-with-body --data-binary @${shell(file)} -H 'Content-Type: image/tiff' \\\n  ${shell(address)} -o ${shell(labels)}`,
    Python: [
      "import urllib.request",
      "",
      `with open(${quoted(file)}, "rb") as stack:`,
      "    request = urllib.request.Request(",
      `        ${quoted(address)},`,
      '        data=stack.read(), headers={"Content-Type": "image/tiff"})',
      `with urllib.request.urlopen(request) as answer, open(${quoted(labels)}, "wb") as labels:`,
      "    labels.write(answer.read())",
    ].join("\n"),
    stackseg: ["stackseg segment", shell(file), shell(`${stem}_labels.ome.tif`), ...options].join(" "),
  };
}

/** @param {string} text */
function shell(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

/** @param {string} text */
function quoted(text) {
  return JSON.stringify(text);
}
