/** Scripts that repeat the request of a result, in several languages. */

import { buildQuery } from "../core/requests.js";

/** @typedef {import("openapi").JobReport} Job */

/** Environment variable from which the scripts read the API key. */
export const KEY_VARIABLE = "STACKSEG_KEY";

/** Create scripts that repeat the request of a job. @param {Job} job @param {string} stackFile file name of the stack @param {string} filterQuery query string that selects the displayed objects of the result @param {boolean} needsKey whether the service requires an API key @returns {Record<string, string>} script by language */
export function createScripts(job, stackFile, filterQuery, needsKey) {
  const { stack: _stack, measurements, ...parameters } = job.parameters;
  const stem = stackFile.replace(/(\.ome)?\.(tiff?|ozx|zarr|zarr\.zip|zip)$/i, "");
  const query = buildQuery({ ...parameters, measurements });
  const url = `${location.origin}${location.pathname.replace(/[^/]*$/, "")}segment${query && "?"}${query}`;
  const labelsFile = `${stem}_labels${measurements ? ".zip" : ".ome.tif"}`;
  const options = Object.entries(parameters).map(
    ([name, value]) => `--${name.replaceAll("_", "-")} ${quoteForShell(String(value))}`,
  );
  if (measurements) options.push(`--measurements ${quoteForShell(`${stem}_objects.csv`)}`);
  const resultUrl = `${url.slice(0, url.indexOf("segment"))}jobs/${job.id}/result?${filterQuery}`;
  const keyOption = needsKey ? ` -H "X-API-Key: $${KEY_VARIABLE}"` : "";
  return {
    ...(filterQuery && {
      "Displayed objects of this result": `curl -sS --fail-with-body -H 'Accept: image/tiff'${keyOption} \\\n  ${quoteForShell(resultUrl)} -o ${quoteForShell(`${stem}_labels.ome.tif`)}`,
    }),
    curl: `curl -sS --fail-with-body --data-binary @${quoteForShell(stackFile)} -H 'Content-Type: image/tiff'${keyOption} \\\n  ${quoteForShell(url)} -o ${quoteForShell(labelsFile)}`,
    Python: [
      ...(needsKey ? ["import os"] : []),
      "import urllib.request",
      "",
      `with open(${quoteForPython(stackFile)}, "rb") as stack:`,
      "    request = urllib.request.Request(",
      `        ${quoteForPython(url)},`,
      `        data=stack.read(), headers={"Content-Type": "image/tiff"${needsKey ? `, "X-API-Key": os.environ["${KEY_VARIABLE}"]` : ""}})`,
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
