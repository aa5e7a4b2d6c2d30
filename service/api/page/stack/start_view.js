/** Start screen with a drop area for stacks, the sample, and the recent jobs in this browser. */

import { acceptDrops, selectChosenFiles } from "../batch/collect_files.js";
import { button, element } from "../core/elements.js";
import { formatAge, formatCount } from "../core/format.js";
import { showPicture } from "../core/requests.js";
import * as correctionStore from "../volumes/correction_store.js";
import {
  describeObjectCount,
  describeState,
  fetchReports,
  forgetJob,
  loadRecentJobs,
  rememberJob,
} from "./recent_jobs.js";

/**
 * Draw the start screen.
 * @param {HTMLElement} root
 * @param {{openFiles: (selection: import("../batch/collect_files.js").Selection) => void, openSample: () => void, openJob: (id: string) => void, redraw: () => void, openServerFolder: (() => void) | null, samplePicture: string | null}} actions redraw: draws the start screen and its lists again; openServerFolder: null if there are no folders on the server that the user may use; samplePicture: path of a picture of the sample with outlines, null if there is none
 * @returns {Record<"batches" | "drafts" | "training" | "projects", HTMLElement>} places for lists, in a fixed order
 */
export function drawStartView(root, actions) {
  const fileInput = element("input", {
    type: "file",
    id: "file",
    accept: ".tif,.tiff,.tf2,.tf8,.btf,.lsm,.stk,.czi,.nd2,.lif,.oib,.ims,.ozx,.zip,image/tiff",
    multiple: true,
    // The button opens the file dialog.
    hidden: true,
    "aria-label": "One or several stacks",
    onchange: () => actions.openFiles(selectChosenFiles(fileInput)),
  });
  const folderInput = element("input", {
    type: "file",
    id: "folder",
    webkitdirectory: true,
    // The button opens the file dialog.
    hidden: true,
    "aria-label": "A folder of stacks",
    onchange: () => actions.openFiles(selectChosenFiles(folderInput)),
  });
  const dropArea = element(
    "section",
    { class: "drop", "aria-label": "Choose a stack" },
    element(
      "div",
      { class: "drop-text" },
      element("h2", {}, "Drop stacks or a folder here"),
      element(
        "p",
        { class: "muted" },
        "TIFF, OME-Zarr, CZI, ND2, LIF, OIB, IMS or LSM. You can check every stack before you start the segmentation.",
      ),
      element(
        "div",
        { class: "row" },
        button("Choose files", () => fileInput.click(), "primary"),
        button("Choose a folder", () => folderInput.click(), "secondary"),
        actions.openServerFolder && button("Folder on the server", actions.openServerFolder, "secondary"),
      ),
    ),
    element(
      "div",
      { class: "drop-sample" },
      actions.samplePicture && createSamplePicture(actions.samplePicture),
      button("Try the sample", actions.openSample, "secondary"),
    ),
    fileInput,
    folderInput,
  );
  acceptDrops(dropArea, actions.openFiles);
  const jobs = loadRecentJobs();
  const createSlot = () => element("div", { class: "slot" });
  const slots = { batches: createSlot(), drafts: createSlot(), training: createSlot(), projects: createSlot() };
  root.replaceChildren(
    dropArea,
    slots.batches,
    jobs.length > 0 ? createRecentJobsSection(jobs, actions.openJob, actions.redraw) : createSteps(),
    slots.drafts,
    slots.training,
    slots.projects,
  );
  return slots;
}

/** Create a picture that is shown as soon as it is loaded. @param {string} path */
function createSamplePicture(path) {
  const image = element("img", { alt: "Outlines of the objects in the sample", width: 168, height: 168, hidden: true });
  showPicture(path, image).catch(() => undefined);
  return image;
}

/** Create the list of steps that is shown if there are no recent jobs. */
function createSteps() {
  const descriptions = [
    ["Check", "Compare the axes, voxel size and channels from the file with the slices and the maximum projection."],
    ["Segment", "Every object gets a number. The job runs on the server, so you can leave the page and come back."],
    ["Correct", "Merge, split or draw objects, or annotate a stack from nothing. Train a model with your annotation."],
    [
      "Export",
      "Save labels as OME-TIFF, NIfTI or NumPy, and a table of volumes and intensities. Repeat the request with a script.",
    ],
  ];
  return element(
    "ol",
    { class: "steps" },
    ...descriptions.map(([name, text]) =>
      element("li", {}, element("h3", {}, name), element("p", { class: "muted" }, text)),
    ),
  );
}

/** Describe the model, the settings and the age of a job, or say that the service no longer stores it. @param {import("./recent_jobs.js").RecentJob} entry */
function describeOrigin({ model, parameters, created, isMissing }) {
  return [model, parameters, isMissing ? "no longer on the server" : formatAge(created)].filter(Boolean).join(" · ");
}

/** @param {import("./recent_jobs.js").RecentJob[]} jobs @param {(id: string) => void} openJob @param {() => void} onchange called after a job has been removed from the list */
function createRecentJobsSection(jobs, openJob, onchange) {
  const countElements = jobs.map((entry) =>
    element("span", { class: "muted" }, entry.objects === null ? "no result yet" : describeObjectCount(entry)),
  );
  const detailElements = jobs.map((entry) => element("span", { class: "muted" }, describeOrigin(entry)));
  /** Number of corrections by job id. @type {Map<string, number>} */
  const correctionCounts = new Map();
  correctionStore.countAllCorrections().then((counts) => {
    for (const [key, count] of counts) {
      const [job] = key.split("@");
      correctionCounts.set(job, (correctionCounts.get(job) ?? 0) + count);
    }
    for (const [index, { job }] of jobs.entries()) {
      const count = correctionCounts.get(job);
      if (count) countElements[index].append(` · ${formatCount(count, "correction")}`);
    }
  });
  const showStates = async () => {
    const reports = await fetchReports(jobs);
    for (const [index, entry] of jobs.entries()) {
      const report = reports.get(entry.job) ?? null;
      const isMissing = report === null;
      if (isMissing !== Boolean(entry.isMissing)) rememberJob({ job: entry.job, isMissing });
      // The text after this node is the number of corrections.
      const countText = countElements[index].firstChild;
      if (countText && report) countText.textContent = describeState(entry, report);
      detailElements[index].textContent = describeOrigin({ ...entry, isMissing });
      countElements[index].closest("li")?.classList.toggle("missing", isMissing);
    }
  };
  // If the service does not respond, the list shows the last known states of the jobs.
  showStates().catch(() => undefined);
  /** @param {import("./recent_jobs.js").RecentJob} entry */
  const removeEntry = async ({ job, name }) => {
    const count = correctionCounts.get(job);
    if (count && !confirm(`Remove ${name} from this list and discard its ${formatCount(count, "correction")}?`)) return;
    forgetJob(job);
    await correctionStore.forgetCorrections(job);
    onchange();
  };
  return element(
    "section",
    { class: "recent", "aria-labelledby": "recent-title" },
    element("h2", { id: "recent-title" }, "Recent stacks in this browser"),
    element(
      "ul",
      {},
      ...jobs.map((entry, index) =>
        element(
          "li",
          { class: entry.isMissing ? "missing" : "" },
          element(
            "button",
            { type: "button", class: "recent-job", onclick: () => openJob(entry.job) },
            entry.thumbnail.startsWith("data:image/")
              ? element("img", { src: entry.thumbnail, alt: "", width: 96, height: 72 })
              : element("span", { class: "no-thumbnail", "aria-hidden": "true" }),
            element(
              "span",
              { class: "recent-text" },
              element("strong", {}, entry.name || "Stack"),
              countElements[index],
              detailElements[index],
            ),
          ),
          element(
            "button",
            {
              type: "button",
              class: "quiet icon",
              "aria-label": `Remove ${entry.name || "the stack"} from this list`,
              onclick: () => removeEntry(entry),
            },
            "×",
          ),
        ),
      ),
    ),
  );
}
