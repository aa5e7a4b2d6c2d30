/** The start screen: a drop area for stacks, the sample, and the recent jobs of this browser. */

import { button, element } from "../core/elements.js";
import { formatAge, formatCount } from "../core/format.js";
import * as correctionStore from "../volumes/correction_store.js";
import { describeCount, forgetJob, recentJobs } from "./recent_jobs.js";

/**
 * @param {HTMLElement} root
 * @param {{open: (file: Blob, name: string) => void, sample: () => void, job: (id: string) => void}} actions
 */
export function showStart(root, actions) {
  const chooser = element("input", {
    type: "file",
    id: "file",
    accept: ".tif,.tiff,.ozx,.zip,image/tiff",
    class: "visually-hidden",
    "aria-label": "A TIFF stack",
    onchange: () => {
      const file = chooser.files?.[0];
      if (file) actions.open(file, file.name);
    },
  });
  const drop = element(
    "section",
    { class: "drop", "aria-label": "Choose a stack" },
    element(
      "div",
      { class: "drop-mark", "aria-hidden": "true" },
      element("img", { src: "page/core/icon.svg", alt: "" }),
    ),
    element("h2", {}, "Drop a TIFF stack here"),
    element(
      "p",
      { class: "muted" },
      "ImageJ TIFF, OME-TIFF, BigTIFF or plain TIFF. You can check the stack before you start the segmentation.",
    ),
    element(
      "div",
      { class: "row" },
      button("Choose a file", () => chooser.click(), "primary"),
      button("Try the sample", actions.sample, "secondary"),
    ),
    chooser,
  );
  acceptDrops(drop, actions.open);
  const list = recentJobs();
  root.replaceChildren(
    drop,
    ...(list.length ? [recentJobsSection(list, actions.job, () => showStart(root, actions))] : [steps()]),
  );
}

/** Accept files dropped anywhere on the page. @param {HTMLElement} drop @param {(file: Blob, name: string) => void} open */
function acceptDrops(drop, open) {
  document.ondragover = (event) => {
    event.preventDefault();
    drop.classList.add("over");
  };
  document.ondragleave = () => drop.classList.remove("over");
  document.ondrop = (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    const file = event.dataTransfer?.files[0];
    if (file) open(file, file.name);
  };
}

function steps() {
  const texts = [
    ["Check", "Compare the axes, voxel size and channels from the file with the slices and the maximum projection."],
    ["Segment", "Every object gets a number. The job runs on the service, so you can leave the page and come back."],
    [
      "Export",
      "Save labels as OME-TIFF, NIfTI or NumPy, and a table of volumes and intensities. Repeat the request with a script.",
    ],
  ];
  return element(
    "ol",
    { class: "steps" },
    ...texts.map(([name, text]) => element("li", {}, element("h3", {}, name), element("p", { class: "muted" }, text))),
  );
}

/** @param {import("./recent_jobs.js").RecentJob[]} list @param {(id: string) => void} open @param {() => void} onchange */
function recentJobsSection(list, open, onchange) {
  const countTexts = list.map((entry) =>
    element("span", { class: "muted" }, entry.objects === null ? "no result yet" : describeCount(entry)),
  );
  /** Number of corrections by job. @type {Map<string, number>} */
  const corrections = new Map();
  correctionStore.counts().then((counts) => {
    for (const [key, edits] of counts) {
      const [job] = key.split("@");
      corrections.set(job, (corrections.get(job) ?? 0) + edits);
    }
    for (const [index, { job }] of list.entries()) {
      const edits = corrections.get(job);
      if (edits) countTexts[index].append(` · ${formatCount(edits, "correction")}`);
    }
  });
  /** @param {import("./recent_jobs.js").RecentJob} entry */
  const remove = async ({ job, name }) => {
    const edits = corrections.get(job);
    if (edits && !confirm(`Remove ${name} from this list and discard its ${formatCount(edits, "correction")}?`)) return;
    forgetJob(job);
    await correctionStore.forget(job);
    onchange();
  };
  return element(
    "section",
    { class: "recent", "aria-labelledby": "recent-title" },
    element("h2", { id: "recent-title" }, "Recent stacks in this browser"),
    element(
      "ul",
      {},
      ...list.map((entry, index) =>
        element(
          "li",
          {},
          element(
            "button",
            { type: "button", class: "recent-job", onclick: () => open(entry.job) },
            entry.thumbnail.startsWith("data:image/")
              ? element("img", { src: entry.thumbnail, alt: "", width: 96, height: 72 })
              : element("span", { class: "no-picture", "aria-hidden": "true" }),
            element(
              "span",
              { class: "recent-words" },
              element("strong", {}, entry.name || "Stack"),
              countTexts[index],
              element("span", { class: "muted" }, `${entry.model} · ${formatAge(entry.created)}`),
            ),
          ),
          element(
            "button",
            {
              type: "button",
              class: "quiet icon",
              "aria-label": `Remove ${entry.name || "the stack"} from this list`,
              onclick: () => remove(entry),
            },
            "×",
          ),
        ),
      ),
    ),
  );
}
